"""Outputs that are calls only: JSON objects without marks."""

from tandem.router.text.tool_parsers.base import ToolParser
from tandem.router.text.tool_parsers.json_scanner import skip_space

PYTHON_TAG = "<|python_tag|>"


class JsonParser(ToolParser):
    """Other text, or an unknown name, is content."""

    tells_by_name = True

    def _content(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._held.append(text[position:start])
        if start == len(text):
            return start
        if text[start] == "[":
            self._held.append("[")
            self._state = self._in_list
            return start + 1
        return self._begin_or_end(text, start)

    def _begin_or_end(self, text: str, position: int) -> int:
        if text[position] == "{":
            self._begin_call()
        else:
            self._break_off(position + 1)
        return position

    def _break_off(self, end: int) -> None:
        self._release(end)
        self._state = self._rest

    def _rest(self, text: str, position: int) -> int:
        self._give_content(text[position:], len(text))
        return len(text)

    def _in_list(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._held.append(text[position:start])
        return start if start == len(text) else self._begin_or_end(text, start)

    def _after_call(self, text: str, position: int) -> int:
        return self._go_on_in_list(text, position, self._in_list, self._rest)


class Llama3Parser(ToolParser):
    """Calls separated by semicolons, optionally after the Python tag."""

    marks = (PYTHON_TAG,)
    tells_by_name = True

    def _content(self, text: str, position: int) -> int:
        """The start of the output, where a call needs no tag."""
        start = skip_space(text, position)
        self._held.append(text[position:start])
        if start < len(text):
            if text[start] == "{":
                self._begin_call()
            else:
                self._break_off(start + 1)
        return start

    def _break_off(self, end: int) -> None:
        self._release(end)
        self._state = self._rest

    def _rest(self, text: str, position: int) -> int:
        return self._find_mark(PYTHON_TAG, text, position, self._tagged)

    def _tagged(self, text: str, position: int) -> int:
        self._begin_call()
        return position

    def _after_call(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        if start == len(text):
            return start
        if text[start] in ";,":
            self._held.append(text[start])
            self._state = self._next
            return start + 1
        if text[start] == "{":
            self._begin_call()
        else:
            self._state = self._rest
        return start

    def _next(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._held.append(text[position:start])
        if start == len(text):
            return start
        if text.startswith(PYTHON_TAG, start):
            self._held.append(PYTHON_TAG)
            self._begin_call()
            return start + len(PYTHON_TAG)
        if PYTHON_TAG.startswith(text[start:]):
            return start
        self._begin_call()
        return start
