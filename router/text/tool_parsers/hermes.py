"""Calls of Hermes, Qwen and others: JSON objects with `name` and `arguments` between tags."""

from tandem.router.text.tool_parsers.base import ToolParser
from tandem.router.text.tool_parsers.json_scanner import skip_space

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    marks = (OPENING, CLOSING)
    closing = CLOSING

    def _content(self, text: str, position: int) -> int:
        return self._find_mark(OPENING, text, position, self._opened)

    def _opened(self, text: str, position: int) -> int:
        self._begin_call()
        return position

    def _break_off(self, end: int) -> None:
        super()._break_off(end)
        if self._reader.has_started:
            # A missing brace: continue as after a whole call.
            self._state = self._after_call

    def _after_call(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        if start < len(text) and text[start] in "{}":
            # Models write several calls between tags, or a surplus brace.
            if text[start] == "}":
                return start + 1
            self._begin_call()
            return start
        return self._skip_mark(CLOSING, text, start, self._content, self._content)
