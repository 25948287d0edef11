import json
from collections.abc import Callable, Collection
from enum import Enum, auto

from tandem.router.text.tool_parsers.json_scanner import WHITESPACE, JsonScanner, skip_space

NAME = "name"
# Depends on the model family.
ARGUMENTS = frozenset(("arguments", "parameters"))
NO_ARGUMENTS = "{}"
NESTED = "{["


class _Expects(Enum):
    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallReader:
    """Reads one call, a JSON object.

    Object arguments are streamed as written, valid JSON or not. Arguments before the name wait for it; string arguments
    wait for their end. Other keys are skipped.

    Attributes:
        has_started: True once the name has been passed on.
        broken_at: position at which the text is known to be no call.
    """

    def __init__(
        self,
        on_name: Callable[[str, int], None],
        on_arguments: Callable[[str, int], None],
        names: Collection[str] | None,
    ) -> None:
        """
        Args:
            on_name, on_arguments: callbacks with a text and the position at which it is known.
        """
        self.has_started = False
        self.is_done = False
        self.is_broken = False
        self.broken_at = 0
        self._on_name = on_name
        self._on_arguments = on_arguments
        self._names = names
        self._expects = _Expects.OBJECT
        self._scanner: JsonScanner | None = None
        self._key = ""
        self._value: list[str] = []
        self._early: str | None = None
        self._has_arguments = False

    def read(self, text: str, position: int) -> int:
        """Returns the end of the call, of its valid part, or of the text."""
        while position < len(text) and not (self.is_done or self.is_broken):
            if self._scanner is not None:
                position = self._scan(self._scanner, text, position)
            elif text[position] in WHITESPACE:
                position = skip_space(text, position)
            else:
                position = self._step(text[position], position)
        return position

    def rest(self) -> str:
        """Incomplete waiting arguments at the end of the text."""
        is_waiting = self.has_started and self._scanner is not None and self._is_arguments
        return "".join(self._value) if is_waiting else ""

    @property
    def _is_arguments(self) -> bool:
        return self._expects is _Expects.VALUE and self._key in ARGUMENTS and not self._has_arguments

    def _step(self, character: str, position: int) -> int:
        expects = self._expects
        if expects is _Expects.OBJECT and character == "{":
            self._expects = _Expects.FIRST_KEY
        elif expects in (_Expects.FIRST_KEY, _Expects.COMMA) and character == "}":
            self._close(position + 1)
            return position if self.is_broken else position + 1
        elif expects is _Expects.COMMA and character == ",":
            self._expects = _Expects.KEY
        elif expects is _Expects.COLON and character == ":":
            self._expects = _Expects.VALUE
        elif expects is _Expects.VALUE or (expects in (_Expects.FIRST_KEY, _Expects.KEY) and character == '"'):
            self._scanner, self._value = JsonScanner(), []
            return position
        else:
            self._break(position + 1)
            return position
        return position + 1

    def _scan(self, scanner: JsonScanner, text: str, start: int) -> int:
        end = scanner.scan(text, start)
        is_streamed = self.has_started and self._is_arguments and scanner.first in NESTED
        if is_streamed and end > start:
            self._on_arguments(text[start:end], end)
        elif end > start:
            self._value.append(text[start:end])
        if scanner.is_broken:
            self._break(end + 1)
        elif scanner.is_done:
            self._scanner = None
            if self._expects is not _Expects.VALUE:
                self._key = _decoded("".join(self._value))
                self._expects = _Expects.COLON
            else:
                # The next character ends a number or a word.
                self._end_value(scanner.first, end if scanner.first in '{["' else end + 1, is_streamed)
        return end

    def _end_value(self, first: str, end: int, is_streamed: bool) -> None:
        value = "" if is_streamed else "".join(self._value)
        if self._key == NAME and not self.has_started:
            name = _decoded(value) if first == '"' else ""
            if not name or (self._names is not None and name not in self._names):
                self._break(end)
                return
            self.has_started = True
            self._on_name(name, end)
            if self._early is not None:
                self._on_arguments(self._early, end)
        elif self._is_arguments:
            self._has_arguments = True
            if not is_streamed:
                arguments = _arguments(first, value)
                if self.has_started:
                    self._on_arguments(arguments, end)
                else:
                    self._early = arguments
        self._expects = _Expects.COMMA

    def _close(self, end: int) -> None:
        if not self.has_started:
            self._break(end)
            return
        self.is_done = True
        if not self._has_arguments:
            self._on_arguments(NO_ARGUMENTS, end)

    def _break(self, at: int) -> None:
        self.is_broken = True
        self.broken_at = at


def _decoded(literal: str) -> str:
    """ "" if invalid."""
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:
        return ""


def _arguments(first: str, value: str) -> str:
    if first == '"':
        return _decoded(value) or NO_ARGUMENTS
    return NO_ARGUMENTS if value == "null" else value
