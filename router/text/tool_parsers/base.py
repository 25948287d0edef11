"""What every tool parser does: it finds the calls of tools in the text of an output, as the text comes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from tandem.router.text.output_parts import Part, PartList
from tandem.router.text.tool_parsers.call_reader import CallReader
from tandem.router.text.tool_parsers.json_scanner import skip_space

# A state of a parser: it takes the text from a position on, and returns up to where it is done with it.
State = Callable[[str, int], int]


class ToolParser(ABC):
    """Finds calls in one output. What it gives follows from the text so far alone, however that was cut into pieces.

    Nothing of the text is lost but the marks around calls, with braces too many, and the whitespace beside them: what
    turns out to be no call is content. A call has begun when its name is known; what breaks after that is content from
    there on. The work for each character does not grow with the text.

    A subclass has states, which hand over to each other through `_state`. A state looks at each character once, but for
    what may be the beginning of a mark and waits to be looked at again.

    Attributes:
        marks: texts that a vocabulary may have special tokens for, which this parser has to see.
        tells_by_name: whether only the name of a function tells a call from other text. Where marks do, a function that
            there is not is called all the same: the client can say so to the model.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    tells_by_name: ClassVar[bool] = False

    def __init__(self, names: Collection[str] | None = None) -> None:
        """Args: names: of the functions that there are; None: any."""
        self._names = names if self.tells_by_name else None
        self._found = PartList()
        self._state: State = self._content
        # The end of the text that no state is done with, and where it begins in the whole.
        self._tail = ""
        self._offset = 0
        # Whitespace at the content's end: it is none of it if a call follows.
        self._space: list[str] = []
        # What is content unless it becomes a call.
        self._held: list[str] = []
        self._reader = CallReader(self._on_name, self._on_arguments, self._names)

    @abstractmethod
    def _content(self, text: str, position: int) -> int:
        """The state that the text begins in."""

    @abstractmethod
    def _after_call(self, text: str, position: int) -> int:
        """The state behind a call's last brace."""

    def feed(self, text: str) -> list[Part]:
        """Takes the next piece of the text. Returns what is certain with it."""
        text, position = self._tail + text, 0
        while position < len(text):
            state = self._state
            start, position = position, state(text, position)
            if start == position and state == self._state:
                break
        self._tail = text[position:]
        self._offset += position
        return self._found.take()

    def finish(self) -> list[Part]:
        """The text has ended: returns the rest, none of which is a call that had not begun."""
        end = self._offset + len(self._tail)
        if self._state == self._call and self._reader.has_started:
            self._found.append("arguments", self._reader.rest(), end)
        self._held.append(self._tail)
        self._tail, self._offset = "", 0
        self._release(end)
        self._found.append("content", "".join(self._space), end)
        self._space.clear()
        return self._found.take()

    def _give_content(self, text: str, end: int) -> None:
        """Args: end: of the text in hand, where this is known to be content."""
        solid = text.rstrip()
        if solid:
            self._space.append(solid)
            self._found.append("content", "".join(self._space), self._offset + end)
            self._space.clear()
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def _begin_call(self) -> None:
        """A call may stand here, and `_held` has what came before its brace and is no content if it does."""
        self._reader = CallReader(self._on_name, self._on_arguments, self._names)
        self._state = self._call

    def _call(self, text: str, position: int) -> int:
        reader = self._reader
        end = reader.read(text, position)
        if not reader.has_started:
            self._held.append(text[position:end])
        if reader.is_done:
            self._state = self._after_call
        elif reader.is_broken:
            self._break_off(reader.broken_at)
        return end

    def _break_off(self, end: int) -> None:
        """This is no call, or not any more. Args: end: of the text in hand, where that is known."""
        self._release(end)
        self._state = self._content

    def _release(self, end: int) -> None:
        held = "".join(self._held)
        self._held.clear()
        if held:
            self._give_content(held, end)

    def _on_name(self, name: str, end: int) -> None:
        self._space.clear()
        self._held.clear()
        self._found.append("call", name, self._offset + end)

    def _on_arguments(self, text: str, end: int) -> None:
        self._found.append("arguments", text, self._offset + end)

    def _skip_mark(self, mark: str, text: str, position: int, then: State, otherwise: State) -> int:
        """Passes over whitespace and the mark, if it is there, and goes on in `then`, or else in `otherwise` behind the
        whitespace."""
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text.startswith(mark, position):
            self._state = then
            return position + len(mark)
        if not mark.startswith(text[position:]):
            self._state = otherwise
        return position

    def _go_on_in_list(self, text: str, position: int, another: State, behind: State) -> int:
        """Behind a call of a list: passes over what separates it from another, or the bracket that closes the list."""
        start = skip_space(text, position)
        if start == len(text):
            return start
        if text[start] == ",":
            self._held.append(",")
            self._state = another
            return start + 1
        self._state = behind
        return start + 1 if text[start] == "]" else start

    def _find_mark(self, mark: str, text: str, position: int, then: State) -> int:
        """Gives content up to the mark, which is held, and goes on in `then` behind it."""
        start = text.find(mark, position)
        if start >= 0:
            end = start + len(mark)
            self._give_content(text[position:start], end)
            self._held.append(mark)
            self._state = then
            return end
        start = len(text) - overlap(text, position, mark)
        # Its end may have waited as what may be a mark.
        self._give_content(text[position:start], len(text))
        return start


def overlap(text: str, position: int, mark: str) -> int:
    """How much of the text's end, from a position on, may be the mark's beginning."""
    for length in range(min(len(mark) - 1, len(text) - position), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
