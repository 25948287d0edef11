"""Where a model's reasoning ends and its answer begins, in text that comes in pieces."""

from dataclasses import dataclass
from enum import Enum, auto

from tandem.router.text.output_parts import Part, PartList
from tandem.router.text.tool_parsers.base import overlap

OPENING, CLOSING = "<think>", "</think>"


class Beginning(Enum):
    """Where an output begins, which the prompt's end and the kind of model say."""

    REASONING = auto()
    # The model may open its reasoning.
    OPEN = auto()
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """How a family of models reasons. Attributes: is_always: also where neither prompt nor output says so."""

    is_always: bool

    def beginning(self, prompt_end: str) -> Beginning:
        """Args: prompt_end: some of the prompt's text, up to where the output begins."""
        end = prompt_end.rstrip()
        if end.endswith(OPENING):
            return Beginning.REASONING
        if end.endswith(CLOSING):
            return Beginning.ANSWER
        return Beginning.REASONING if self.is_always else Beginning.OPEN

    def beginning_within(self, message: str) -> Beginning:
        """Args: message: what the output goes on with."""
        opened, closed = message.rfind(OPENING), message.rfind(CLOSING)
        if opened > closed:
            return Beginning.REASONING
        return Beginning.ANSWER if message else self.beginning("")


# By their names in a configuration (`reasoning_parser`).
REASONING_STYLES = {"deepseek_r1": ReasoningStyle(is_always=True), "qwen3": ReasoningStyle(is_always=False)}


class ReasoningParser:
    """Parts an output's reasoning from what follows. What it gives follows from the text so far alone, however that was
    cut into pieces, and it looks at each character once, but for what may be the beginning of a mark.

    The marks are left out, and so is whitespace around the reasoning and before the answer.

    Attributes:
        is_reasoning: whether it has begun and is not over.
    """

    def __init__(self, beginning: Beginning) -> None:
        self._found = PartList()
        self.is_reasoning = beginning is Beginning.REASONING
        # At the very beginning, where the mark that opens it may stand.
        self._is_first = beginning is not Beginning.ANSWER
        self._is_behind = False
        self._is_over = beginning is Beginning.ANSWER
        self._tail = ""
        # Whitespace before anything else.
        self._leading: list[str] = []
        self._num_characters = 0
        self._space: list[str] = []
        self._has_begun = False

    @property
    def has_reasoned(self) -> bool:
        """Whether there is reasoning, if only its mark."""
        return self.is_reasoning or self._is_behind

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Takes the next piece of the text. Returns what is certain to be reasoning with it, and what follows the
        reasoning: the end of the text so far."""
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
        """The text has ended: as `feed`, with the rest."""
        tail, self._tail = self._tail, ""
        if not self.is_reasoning:
            return [], "".join((*self._leading, tail)) if self._is_first else tail
        self._give(tail, self._num_characters)
        return self._found.take(), ""

    def _begin(self, text: str) -> str:
        """Passes over the mark that opens the reasoning. Returns what follows."""
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
        """Gives reasoning up to its end. Returns what follows."""
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
