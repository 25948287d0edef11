from dataclasses import dataclass
from typing import Literal

Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(slots=True)
class Part:
    """
    Attributes:
        kind: "call" starts a function call; "arguments" continues the last call.
        text: text of the part; the function's name for a call.
        end: number of characters of output after which the part is certain.
        call: index of the call in the output.
    """

    kind: Kind
    text: str
    end: int
    call: int = 0


class PartList:
    """Neighbors of one kind merge."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        # Joined once: there may be one piece for each character.
        self._pieces: list[str] = []

    def append(self, kind: Kind, text: str, end: int, call: int = 0) -> None:
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind == kind != "call" and last.call == call and not self._ends_with_another:
            last.end = end
        else:
            self._finish_last()
            self._parts.append(Part(kind, "", end, call))
        self._pieces.append(text)

    @property
    def _ends_with_another(self) -> bool:
        """A part with the same end as the one before is not extended."""
        return len(self._parts) > 1 and self._parts[-2].end == self._parts[-1].end

    def _finish_last(self) -> None:
        if self._parts:
            self._parts[-1].text = "".join(self._pieces)
            self._pieces.clear()

    def take(self) -> list[Part]:
        self._finish_last()
        taken, self._parts = self._parts, []
        return taken
