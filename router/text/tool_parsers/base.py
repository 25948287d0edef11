"""Base of tool parsers, which find tool calls in streamed output."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from tandem.router.text.output_parts import Part, PartList
from tandem.router.text.tool_parsers.call_reader import CallReader
from tandem.router.text.tool_parsers.json_scanner import skip_space

# Takes text and a position, and returns the end of the processed text.
State = Callable[[str, int], int]


class ToolParser(ABC):
    """Finds calls in one output, whatever the cuts between pieces.

    Call marks, surplus braces and whitespace beside them are dropped. All other text is content, including failed calls
    and malformed text after a call's name. Work per character is constant.

    A subclass has states that follow each other through `_state`. A state scans each character once, except a possible
    start of a mark.

    Attributes:
        marks: texts, possibly special tokens, that this parser has to see.
        closing: text after each call, dropped even if it is cut off; "" for none.
        tells_by_name: True if only a known function's name distinguishes a call from text. Parsers with marks also pass
            on calls of unknown functions, so that the client can tell the model.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    closing: ClassVar[str] = ""
    tells_by_name: ClassVar[bool] = False

    def __init__(self, names: Collection[str] | None = None) -> None:
        """
        Args:
            names: known functions; None: any.
        """
        self._names = names if self.tells_by_name else None
        self._found = PartList()
        self._state: State = self._content
        # Unprocessed end of the text, and its position in the whole.
        self._tail = ""
        self._offset = 0
        # Whitespace after content, dropped if a call follows.
        self._space: list[str] = []
        # Content unless it becomes a call.
        self._held: list[str] = []
        self._reader = CallReader(self._on_name, self._on_arguments, self._names)

    @abstractmethod
    def _content(self, text: str, position: int) -> int:
        """The initial state."""

    @abstractmethod
    def _after_call(self, text: str, position: int) -> int:
        """The state after a call's last brace."""

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that are certain after the next piece."""
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
        """Returns the rest. A call without a known name is content."""
        end = self._offset + len(self._tail)
        if self._state == self._call and self._reader.has_started:
            self._found.append("arguments", self._reader.rest(), end)
        is_closing = self._state == self._after_call and self.closing.startswith(self._tail.strip())
        if not is_closing:
            self._held.append(self._tail)
        self._tail, self._offset = "", 0
        self._release(end)
        self._found.append("content", "".join(self._space), end)
        self._space.clear()
        return self._found.take()

    def _give_content(self, text: str, end: int) -> None:
        """Args: end: position at which this is known to be content."""
        solid = text.rstrip()
        if solid:
            self._space.append(solid)
            self._found.append("content", "".join(self._space), self._offset + end)
            self._space.clear()
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def _begin_call(self) -> None:
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
        """Args: end: position at which the failure is known."""
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
        """Skips whitespace and the mark, then continues in `then`; without the mark in `otherwise`."""
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
        """Adds content up to the mark, holds the mark and continues in `then`."""
        start = text.find(mark, position)
        if start >= 0:
            end = start + len(mark)
            self._give_content(text[position:start], end)
            self._held.append(mark)
            self._state = then
            return end
        start = len(text) - overlap(text, position, mark)
        # The end of this text may have waited as a possible mark.
        self._give_content(text[position:start], len(text))
        return start


def overlap(text: str, position: int, mark: str) -> int:
    """Length of the mark's beginning at the text's end."""
    for length in range(min(len(mark) - 1, len(text) - position), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
