"""Tokenizes inputs to embed, whole or truncated, without blocking the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tandem.router.errors import RequestTooLargeError
from tandem.router.text.prompt_cut import PromptCut, surely_beyond
from tandem.router.text.prompt_encoder import MAX_INLINE_CHARACTERS
from tandem.router.text.tokenizer import Tokenizer

# truncate_prompt_tokens for as many tokens as the model takes.
AS_MANY_AS_FIT = -1


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

    def cut(self, num_tokens: int | None, *, keeps_end: bool) -> PromptCut | None:
        """Args: num_tokens: to keep, or AS_MANY_AS_FIT; None: no truncation. Raises ValueError."""
        if num_tokens is None:
            return None
        if num_tokens == AS_MANY_AS_FIT:
            return PromptCut(self._max_model_len, keeps_end)
        if not 1 <= num_tokens <= self._max_model_len:
            raise ValueError(
                f"at least 1 and at most {self._max_model_len} tokens can be kept, not {num_tokens}; "
                f"{AS_MANY_AS_FIT} keeps as many as the model takes"
            )
        return PromptCut(num_tokens, keeps_end)

    async def encode(self, text: str, cut: PromptCut | None, *, add_special_tokens: bool) -> list[int]:
        """Raises ValueError, RequestTooLargeError, TimeoutError."""

        def encode() -> list[int]:
            return self._encode(text, cut, add_special_tokens)

        if len(text) > MAX_INLINE_CHARACTERS:
            return await self._beside(encode)
        # A request may have thousands of inputs.
        await asyncio.sleep(0)
        return encode()

    def fitted(self, token_ids: Sequence[int], cut: PromptCut | None) -> Sequence[int]:
        """Returns the kept tokens. Raises RequestTooLargeError."""
        if cut is not None:
            return cut.of(token_ids)
        self._check_num_tokens(len(token_ids))
        return token_ids

    def _encode(self, text: str, cut: PromptCut | None, add_special_tokens: bool) -> list[int]:
        if cut is not None:
            return cut.tokens(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if surely_beyond(self._tokenizer, text, self._max_model_len):
            raise self._too_long(f"more than {self._max_model_len} tokens")
        encoding = self._tokenizer.tokenize(text, add_special_tokens)
        # Before building the list of ids under the GIL.
        self._check_num_tokens(len(encoding))
        return encoding.ids

    def _check_num_tokens(self, num_tokens: int) -> None:
        if num_tokens > self._max_model_len:
            raise self._too_long(f"{num_tokens} tokens")

    def _too_long(self, found: str) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"the input has {found}, but the model's maximum context length is {self._max_model_len} tokens: shorten "
            "it, or set truncate_prompt_tokens",
            "input",
        )
