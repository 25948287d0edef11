"""Tokenizes texts of any length, within a limit or truncated, at a bounded cost."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tandem.router.text.tokenizer import Tokenizer

T = TypeVar("T")

# Texts have 3 to 5 characters per token. Longer texts are counted in pieces first, up to the limit.
PLAUSIBLE_CHARACTERS_PER_TOKEN = 8
PIECE_CHARACTERS = 2**16
# Extra tokens of a piece, whose ends may cut tokens.
MAX_TOKENS_OF_CUTS = 64


class PromptCut(NamedTuple):
    """
    Attributes:
        num_tokens: length of the longest prompt that stays whole, special tokens included.
        keeps_end: whether the last tokens stay; False: the first.
    """

    num_tokens: int
    keeps_end: bool

    def of(self, items: Sequence[T]) -> Sequence[T]:
        return self.part(items, self.num_tokens)

    def part(self, items: Sequence[T], num_items: int) -> Sequence[T]:
        return items[max(0, len(items) - num_items) :] if self.keeps_end else items[:num_items]

    def tokens(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenizes as much of the text's kept side as the tokens need. Special tokens stay. Raises ValueError for a
        lone surrogate."""
        num_wanted = max(0, self.num_tokens - (tokenizer.num_special_tokens if add_special_tokens else 0))
        # The cut may change the tokens beside it.
        num_needed = num_wanted + MAX_TOKENS_OF_CUTS
        num_characters = PLAUSIBLE_CHARACTERS_PER_TOKEN * num_needed
        while True:
            window = self.part(text, num_characters)
            encoding = tokenizer.tokenize(str(window), False)
            # Even the longest tokens do not need more characters.
            is_enough = len(encoding) >= num_needed or num_characters >= num_needed * tokenizer.max_token_bytes
            if is_enough or len(window) == len(text):
                break
            num_characters *= 4
        encoding.truncate(num_wanted, direction="left" if self.keeps_end else "right")
        return tokenizer.finish(encoding, add_special_tokens)[: self.num_tokens]


def surely_beyond(tokenizer: Tokenizer, text: str, limit: int) -> int:
    """Returns a number of tokens above the limit that the text surely has, or 0: it may fit."""
    num_tokens = 0
    if len(text) > limit * PLAUSIBLE_CHARACTERS_PER_TOKEN:
        for start in range(0, len(text), PIECE_CHARACTERS):
            encoding = tokenizer.tokenize(text[start : start + PIECE_CHARACTERS], False)
            num_tokens += max(0, len(encoding) - MAX_TOKENS_OF_CUTS)
            if num_tokens > limit:
                return num_tokens
    return 0
