"""Splits an output into reasoning, then content and calls."""

from tandem.router.text.output_parts import Part, PartList
from tandem.router.text.reasoning import ReasoningParser
from tandem.router.text.tool_parsers.base import ToolParser


class OutputParser:
    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        max_calls: int | None,
        calls_only: bool = False,
        num_seen: int = 0,
    ) -> None:
        """
        Args:
            max_calls: limit of calls, further ones are dropped; None: no limit.
            calls_only: True if a grammar forces calls. Other text is then part of a call cut off.
            num_seen: characters whose parts the client already has.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._calls_only = calls_only
        self._num_calls = 0
        self._num_fed = 0
        self._tools_offset: int | None = None
        self._num_seen = num_seen

    @property
    def num_calls(self) -> int:
        return self._num_calls if self._max_calls is None else min(self._num_calls, self._max_calls)

    @property
    def _is_within_max(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    @property
    def has_reasoned(self) -> bool:
        return self._reasoning is not None and self._reasoning.has_reasoned

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_reasoning

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        num_seen, self._num_seen = self._num_seen, max(0, self._num_seen - len(text))
        if num_seen and text:
            # Cut the parts at the end of the client's text.
            self._parts_of(text[:num_seen], is_last=False)
            text = text[num_seen:]
        return self._parts_of(text, is_last=is_last)

    def _parts_of(self, text: str, *, is_last: bool) -> list[Part]:
        self._num_fed += len(text)
        if self._reasoning is None:
            return self._answer_parts(text, is_last=is_last)
        parts, rest = self._reasoning.feed(text)
        if is_last:
            last_parts, last_rest = self._reasoning.finish()
            parts, rest = [*parts, *last_parts], rest + last_rest
        return parts + self._answer_parts(rest, is_last=is_last)

    def _answer_parts(self, text: str, *, is_last: bool) -> list[Part]:
        if self._tools is None:
            return [Part("content", text, self._num_fed)] if text else []
        if self._tools_offset is None and text:
            self._tools_offset = self._num_fed - len(text)
        found = self._tools.feed(text)
        if is_last:
            found += self._tools.finish()
        parts = PartList()
        for part in found:
            if part.kind == "call":
                self._num_calls += 1
            is_shown = not self._calls_only if part.kind == "content" else self._is_within_max
            if is_shown:
                end = part.end + (self._tools_offset or 0)
                parts.append(part.kind, part.text, end, max(0, self._num_calls - 1))
        return parts.take()
