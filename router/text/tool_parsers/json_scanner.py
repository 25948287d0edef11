import re

WHITESPACE = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'[^"\\]*')
_IN_NESTED = re.compile(r'[^"{}\[\]]*')
_IN_LITERAL = re.compile(r"[-+.0-9A-Za-z]*")
_CLOSING = {"{": "}", "[": "]"}


def skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


class JsonScanner:
    """Finds the end of one JSON value. It checks strings and brackets only."""

    def __init__(self) -> None:
        self.first = ""
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []
        self._in_string = False
        self._is_escaped = False

    def scan(self, text: str, position: int) -> int:
        """Returns the end of the value, of its valid part, or of the text. Scans each character once."""
        length = len(text)
        while position < length and not (self.is_done or self.is_broken):
            position = self._step(text, position)
        return position

    def _step(self, text: str, position: int) -> int:
        character = text[position]
        if self._in_string:
            return self._scan_string(text, position)
        if self.first and not self._open:
            # A number or a word ends before the first character outside it.
            position = _end(_IN_LITERAL, text, position)
            self.is_done = position < len(text)
            return position
        if not self.first:
            self.first = character
            if character not in '"{[' and _end(_IN_LITERAL, text, position) == position:
                self.is_broken = True
                return position
            if character not in '"{[':
                return position + 1
        if character == '"':
            self._in_string = True
            return position + 1
        if character in "{[":
            self._open.append(_CLOSING[character])
            return position + 1
        if character in "}]":
            if character != self._open.pop():
                self.is_broken = True
                return position
            self.is_done = not self._open
            return position + 1
        return _end(_IN_NESTED, text, position)

    def _scan_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        position = _end(_IN_STRING, text, position)
        if position == len(text):
            return position
        if text[position] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_done = not self._open
        return position + 1


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    assert match is not None
    return match.end()
