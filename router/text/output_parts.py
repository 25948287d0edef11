"""What the text of an output is made of: reasoning, content, and calls of tools."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(slots=True)
class Part:
    """A piece of an output.

    Attributes:
        kind: "call" begins a call of a function, "arguments" goes on with the last call.
        text: the function's name if it is a call.
        end: of the output's text, in characters: the parts that end here or before are what follows from so much of the
            text, however it came.
        call: which call of the output this is or goes on with.
    """

    kind: Kind
    text: str
    end: int
    call: int = 0


class PartList:
    """Parts in the order of the text; neighbours of one kind become one."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        # Of the last one's text, which is put together once: there may be as many as characters.
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
        """Whether the last part follows from the same text as the one before: then it is not made longer."""
        return len(self._parts) > 1 and self._parts[-2].end == self._parts[-1].end

    def _finish_last(self) -> None:
        if self._parts:
            self._parts[-1].text = "".join(self._pieces)
            self._pieces.clear()

    def take(self) -> list[Part]:
        self._finish_last()
        taken, self._parts = self._parts, []
        return taken
