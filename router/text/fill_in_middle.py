"""Prompts for models that fill in the middle of a text."""

from typing import NamedTuple


class FimForm(NamedTuple):
    """
    Attributes:
        prefix, suffix: special tokens in front of these parts.
        middle: special token in front of the output; "": it continues the last part.
        is_suffix_first: whether the suffix is written in front of the prefix.
    """

    prefix: str
    suffix: str
    middle: str = ""
    is_suffix_first: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.prefix, self.suffix, self.middle) if mark)

    def prompt(self, prefix: str, suffix: str) -> str:
        first, last = f"{self.prefix}{prefix}", f"{self.suffix}{suffix}"
        if self.is_suffix_first:
            first, last = last, first
        return f"{first}{last}{self.middle}"


FIM_FORMS = (
    # Qwen 2.5, CodeGemma.
    FimForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite.
    FimForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder.
    FimForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek.
    FimForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Codestral.
    FimForm("[PREFIX]", "[SUFFIX]", is_suffix_first=True),
)
