"""Calls of Mistral: after a tag, a JSON list, or one call with its name before the arguments' tag."""

import re
from collections.abc import Sequence

from tandem.router.text.tool_parsers.base import ToolParser
from tandem.router.text.tool_parsers.json_scanner import JsonScanner, skip_space

OPENING, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class MistralParser(ToolParser):
    marks = (OPENING, CALL_ID, ARGUMENTS)

    def _content(self, text: str, position: int) -> int:
        return self._find_mark(OPENING, text, position, self._opened)

    def _opened(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._held.append(text[position:start])
        if start == len(text):
            return start
        if text[start] == "[":
            self._held.append("[")
            self._state = self._in_list
            return start + 1
        if text[start] == "{":
            self._begin_call()
        else:
            self._name: list[str] = []
            self._state = self._in_name
        return start

    # --- list of calls ---

    def _in_list(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._held.append(text[position:start])
        if start == len(text):
            return start
        self._begin_call()
        return start

    def _after_call(self, text: str, position: int) -> int:
        return self._go_on_in_list(text, position, self._in_list, self._content)

    # --- one call: `name[ARGS]{...}` ---

    def _in_name(self, text: str, position: int) -> int:
        match = _NAME.match(text, position)
        assert match is not None
        end = match.end()
        self._name.append(text[position:end])
        self._held.append(text[position:end])
        name = "".join(self._name)
        if len(name) > MAX_NAME:
            self._break_off(end)
        elif end < len(text):
            for mark, then in ((ARGUMENTS, self._named), (CALL_ID, self._in_call_id)):
                if text.startswith(mark, end) and name:
                    self._held.append(mark)
                    self._state = then
                    return end + len(mark)
                if name and mark.startswith(text[end:]):
                    return end
            if text[end] == "{" and name:
                self._state = self._named
            else:
                self._break_off(_differing(text, end, (ARGUMENTS, CALL_ID) if name else ()))
        return end

    def _in_call_id(self, text: str, position: int) -> int:
        match = _NAME.match(text, position)
        assert match is not None
        end = match.end()
        self._held.append(text[position:end])
        if text.startswith(ARGUMENTS, end):
            self._held.append(ARGUMENTS)
            self._state = self._named
            return end + len(ARGUMENTS)
        if end < len(text) and not ARGUMENTS.startswith(text[end:]):
            self._break_off(_differing(text, end, (ARGUMENTS,)))
        return end

    def _named(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._held.append(text[position:start])
        if start == len(text):
            return start
        if text[start] == "{":
            # Without a tag between them, name and brace become known at the same character.
            self._on_name("".join(self._name), start + 1)
            self._on_arguments("{", start + 1)
            self._scanner = JsonScanner()
            self._scanner.scan("{", 0)
            self._state = self._in_arguments
            return start + 1
        self._break_off(start + 1)
        return start

    def _in_arguments(self, text: str, position: int) -> int:
        end = self._scanner.scan(text, position)
        if end > position:
            self._on_arguments(text[position:end], end)
        if self._scanner.is_done or self._scanner.is_broken:
            self._state = self._content
        return end


def _differing(text: str, start: int, marks: Sequence[str]) -> int:
    end = start + 1
    while any(mark.startswith(text[start:end]) for mark in marks):
        end += 1
    return end
