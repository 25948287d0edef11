"""Splits streamed text into reasoning and answer."""

from dataclasses import dataclass
from enum import Enum, auto

from tandem.router.text.output_parts import Part, PartList
from tandem.router.text.tool_parsers.base import overlap

OPENING, CLOSING = "<think>", "</think>"


class Beginning(Enum):
    REASONING = auto()
    # The model may open its reasoning.
    OPEN = auto()
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """
    Attributes:
        is_always: True if outputs start with reasoning even without a mark.
    """

    is_always: bool

    def beginning(self, prompt_end: str) -> Beginning:
        end = prompt_end.rstrip()
        if end.endswith(OPENING):
            return Beginning.REASONING
        if end.endswith(CLOSING):
            return Beginning.ANSWER
        return Beginning.REASONING if self.is_always else Beginning.OPEN

    def beginning_within(self, message: str) -> Beginning:
        """Args: message: text that the output continues."""
        opened, closed = message.rfind(OPENING), message.rfind(CLOSING)
        if opened > closed:
            return Beginning.REASONING
        return Beginning.ANSWER if message else self.beginning("")


REASONING_STYLES = {"deepseek_r1": ReasoningStyle(is_always=True), "qwen3": ReasoningStyle(is_always=False)}


class ReasoningParser:
    """Splits reasoning from the answer, whatever the cuts between pieces. Marks and whitespace around the reasoning are
    dropped. Each character is scanned once, except a possible start of a mark."""

    def __init__(self, beginning: Beginning) -> None:
        self._found = PartList()
        self.is_reasoning = beginning is Beginning.REASONING
        self._is_first = beginning is not Beginning.ANSWER
        self._is_behind = False
        self._is_over = beginning is Beginning.ANSWER
        self._tail = ""
        self._leading: list[str] = []
        self._num_characters = 0
        self._space: list[str] = []
        self._has_begun = False

    @property
    def has_reasoned(self) -> bool:
        """Also for a mark without reasoning."""
        return self.is_reasoning or self._is_behind

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Returns the certain parts of reasoning, and the new text behind it."""
        if self._is_over:
            self._num_characters += len(text)
            return [], text
        text = self._tail + text
        self._num_characters += len(text) - len(self._tail)
        self._tail = ""
        if self._is_first:
            text = self._begin(text)
        if self.is_reasoning and text:
            text = self._reason(text)
        if self._is_behind:
            text = text.lstrip()
            self._is_over = bool(text)
        return self._found.take(), text

    def finish(self) -> tuple[list[Part], str]:
        tail, self._tail = self._tail, ""
        if not self.is_reasoning:
            return [], "".join((*self._leading, tail)) if self._is_first else tail
        self._give(tail, self._num_characters)
        return self._found.take(), ""

    def _begin(self, text: str) -> str:
        bare = text.lstrip()
        self._leading.append(text[: len(text) - len(bare)])
        if bare.startswith(OPENING):
            self._is_first, self.is_reasoning = False, True
            return bare[len(OPENING) :]
        if OPENING.startswith(bare):
            self._tail = bare
            return ""
        self._is_first = False
        if self.is_reasoning:
            return bare
        self._is_over = True
        return "".join((*self._leading, bare))

    def _reason(self, text: str) -> str:
        base = self._num_characters - len(text)
        start = text.find(CLOSING)
        if start >= 0:
            self._give(text[:start], base + start + len(CLOSING))
            self._space.clear()
            self.is_reasoning, self._is_behind = False, True
            return text[start + len(CLOSING) :]
        start = len(text) - overlap(text, 0, CLOSING)
        self._give(text[:start], self._num_characters)
        self._tail = text[start:]
        return ""

    def _give(self, text: str, end: int) -> None:
        solid = text.rstrip()
        if solid:
            found = "".join(self._space) + solid
            self._found.append("reasoning", found if self._has_begun else found.lstrip(), end)
            self._has_begun = True
            self._space.clear()
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])
