"""Tokenizes inputs to embed, whole or truncated, without blocking the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tandem.router.errors import RequestTooLargeError
from tandem.router.text.prompt_encoder import (
    MAX_INLINE_CHARACTERS,
    MAX_TOKENS_OF_CUTS,
    PIECE_CHARACTERS,
    PLAUSIBLE_CHARACTERS_PER_TOKEN,
)
from tandem.router.text.tokenizer import Tokenizer

# truncate_prompt_tokens for as many tokens as the model takes.
AS_MANY_AS_FIT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """
    Attributes:
        num_tokens: tokens to keep, special ones included; AS_MANY_AS_FIT for the model's length.
        keeps_last: keep the last tokens instead of the first.
    """

    num_tokens: int
    keeps_last: bool = False


class InputEncoder:
    """Inputs have no output, so they may fill the model's length."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        beside: Callable[[Callable[[], list[int]]], Awaitable[list[int]]],
    ) -> None:
        """Args: beside: runs a function in a thread; raises TimeoutError."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._beside = beside

    def check(self, truncation: Truncation | None) -> None:
        """Raises ValueError."""
        if truncation is None or truncation.num_tokens == AS_MANY_AS_FIT:
            return
        if not 1 <= truncation.num_tokens <= self._max_model_len:
            raise ValueError(
                f"at least 1 and at most {self._max_model_len} tokens can be kept, not {truncation.num_tokens}; "
                f"{AS_MANY_AS_FIT} keeps as many as the model takes"
            )

    async def encode(self, text: str, truncation: Truncation | None, *, add_special_tokens: bool) -> list[int]:
        """Raises ValueError, RequestTooLargeError, TimeoutError."""

        def encode() -> list[int]:
            return self._encode(text, truncation, add_special_tokens)

        if len(text) > MAX_INLINE_CHARACTERS:
            return await self._beside(encode)
        # A request may have thousands of inputs.
        await asyncio.sleep(0)
        return encode()

    def fitted(self, token_ids: Sequence[int], truncation: Truncation | None) -> Sequence[int]:
        """Returns the kept tokens. Raises RequestTooLargeError."""
        if truncation is None:
            self._check_num_tokens(len(token_ids))
            return token_ids
        num_kept = self._num_kept(truncation)
        return token_ids[max(0, len(token_ids) - num_kept) :] if truncation.keeps_last else token_ids[:num_kept]

    def _encode(self, text: str, truncation: Truncation | None, add_special_tokens: bool) -> list[int]:
        if truncation is None:
            if self._part(text, self._max_model_len, from_end=False) != text:
                raise self._too_long(f"more than {self._max_model_len} tokens")
            encoding = self._tokenizer.tokenize(text, add_special_tokens)
            # Before building the list of ids under the GIL.
            self._check_num_tokens(len(encoding))
            return encoding.ids
        num_kept = self._num_kept(truncation)
        part = self._part(text, num_kept, from_end=truncation.keeps_last)
        return self._tokenizer.tokenize_cut(
            part, num_kept, keeps_last=truncation.keeps_last, add_special_tokens=add_special_tokens
        )

    def _part(self, text: str, num_tokens: int, *, from_end: bool) -> str:
        """Returns the shortest part, in pieces, that surely has more tokens; else the whole text."""
        if len(text) <= num_tokens * PLAUSIBLE_CHARACTERS_PER_TOKEN:
            return text
        num_found = -MAX_TOKENS_OF_CUTS
        for length in range(PIECE_CHARACTERS, len(text), PIECE_CHARACTERS):
            end = len(text) - length + PIECE_CHARACTERS if from_end else length
            piece = text[end - PIECE_CHARACTERS : end]
            num_found += max(0, len(self._tokenizer.tokenize(piece, False)) - MAX_TOKENS_OF_CUTS)
            if num_found > num_tokens:
                return text[len(text) - length :] if from_end else text[:length]
        return text

    def _num_kept(self, truncation: Truncation) -> int:
        return self._max_model_len if truncation.num_tokens == AS_MANY_AS_FIT else truncation.num_tokens

    def _check_num_tokens(self, num_tokens: int) -> None:
        if num_tokens > self._max_model_len:
            raise self._too_long(f"{num_tokens} tokens")

    def _too_long(self, found: str) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"the input has {found}, but the model's maximum context length is {self._max_model_len} tokens: shorten "
            "it, or set truncate_prompt_tokens",
            "input",
        )
