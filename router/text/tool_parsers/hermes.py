"""Calls between tags, each a JSON object with `name` and `arguments`: Hermes, Qwen and others."""

from router.text.tool_parsers.base import ToolParser

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    marks = (OPENING, CLOSING)

    def _content(self, text: str, position: int) -> int:
        return self._find_mark(OPENING, text, position, self._opened)

    def _opened(self, text: str, position: int) -> int:
        self._begin_call()
        return position

    def _after_call(self, text: str, position: int) -> int:
        # A model that leaves the closing tag out has made a call all the same.
        return self._skip_mark(CLOSING, text, position, self._content, self._content)
