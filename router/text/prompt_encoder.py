"""Tokenizes prompts without blocking the event loop."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tandem.router.errors import PromptTooLongError
from tandem.router.text.chat import Chat, Message
from tandem.router.text.prompt_cut import PromptCut, surely_beyond
from tandem.router.text.tokenizer import Tokenizer

T = TypeVar("T")

# Longest prompt to tokenize inline: about 1 ms. A thread's round trip takes 0.1 ms.
MAX_INLINE_CHARACTERS = 4096
# Templates take 2 to 20 us per message.
MAX_INLINE_MESSAGES = 64
# OpenAI's limit. Each message is a turn of the template's loops, some of them nested.
MAX_MESSAGES = 2048
# Characters of a role's name, which a template writes.
MAX_ROLE_LEN = 64
# Each thread takes a core, because tokenizing releases the GIL.
MAX_ENCODING_THREADS = 4
MAX_ENDING_CHARACTERS = 64
TIMEOUT_S = 60.0


class PromptEncoder:
    """Chat templates are Python and hold the GIL, so a single thread renders one chat at a time.

    Encode methods raise ValueError with a message for the client, and TimeoutError after TIMEOUT_S.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        # Computed before the first request: it scans the vocabulary.
        self._max_characters = max_model_len * tokenizer.max_token_bytes
        num_threads = min(MAX_ENCODING_THREADS, os.cpu_count() or 1)
        self._encoding = ThreadPoolExecutor(num_threads, "encode")
        self._rendering = ThreadPoolExecutor(1, "render")

    async def encode(self, text: str, *, add_special_tokens: bool = True, cut: PromptCut | None = None) -> list[int]:
        return await self._encode(text, add_special_tokens=add_special_tokens, cut=cut)

    async def encode_chat(self, chat: Chat | Sequence[Message], *, add_special_tokens: bool = False) -> list[int]:
        """Args: add_special_tokens: adds special tokens to those of the template, BOS included."""
        return (await self.render_and_encode(chat, add_special_tokens=add_special_tokens))[0]

    async def render_and_encode(
        self, chat: Chat | Sequence[Message], *, add_special_tokens: bool = False, cut: PromptCut | None = None
    ) -> tuple[list[int], str]:
        """Returns also the last MAX_ENDING_CHARACTERS of the text."""
        messages = chat.messages if isinstance(chat, Chat) else chat
        self.check_num_messages(len(messages))
        num_characters = chat.num_characters if isinstance(chat, Chat) else Chat(chat).num_characters
        if cut is None:
            self._check_characters(num_characters)
        if num_characters <= MAX_INLINE_CHARACTERS and len(messages) <= MAX_INLINE_MESSAGES:
            text = self._tokenizer.render_chat(chat)
        else:
            text = await self._beside(self._rendering, self._tokenizer.render_chat, chat)
        token_ids = await self._encode(text, add_special_tokens=add_special_tokens, cut=cut)
        if cut is not None and not cut.keeps_end:
            text = self._tokenizer.decode(token_ids[-MAX_ENDING_CHARACTERS:], skip_special_tokens=False)
        return token_ids, text[-MAX_ENDING_CHARACTERS:]

    async def encode_beside(self, function: Callable[[], T]) -> T:
        """Runs a function in one of the threads that tokenize."""
        return await self._beside(self._encoding, function)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= MAX_INLINE_CHARACTERS:
            return self._tokenizer.decode(token_ids, skip_special_tokens)
        return await self._beside(self._encoding, self._tokenizer.decode_prompt, token_ids, skip_special_tokens)

    def check_num_messages(self, num_messages: int) -> None:
        """Checks the size of a chat before any work per message."""
        if not num_messages:
            raise ValueError("the chat has no messages")
        if num_messages > MAX_MESSAGES:
            raise ValueError(f"the chat has {num_messages} messages; at most {MAX_MESSAGES} are taken")
        if num_messages >= self._max_model_len:
            raise self._too_long(f"{num_messages} messages cannot fit")

    def check_num_tokens(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise self._too_long(f"{num_tokens} tokens > {self._max_model_len - 1} maximum")

    def close(self) -> None:
        """Running work ends by itself."""
        for threads in (self._encoding, self._rendering):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, text: str, *, add_special_tokens: bool, cut: PromptCut | None = None) -> list[int]:
        if cut is None:
            self._check_characters(len(text))
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self._encode_at_once(text, add_special_tokens, cut)
        return await self._beside(self._encoding, self._encode_at_once, text, add_special_tokens, cut)

    def _encode_at_once(self, text: str, add_special_tokens: bool, cut: PromptCut | None) -> list[int]:
        if cut is not None:
            return cut.tokens(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if num_tokens := surely_beyond(self._tokenizer, text, self._max_model_len - 1):
            raise self._too_long(f"more than {num_tokens} tokens > {self._max_model_len - 1} maximum")
        encoding = self._tokenizer.tokenize(text, add_special_tokens)
        # Before building the list of ids under the GIL.
        self.check_num_tokens(len(encoding))
        return encoding.ids

    def _check_characters(self, num_characters: int) -> None:
        if num_characters > self._max_characters:
            raise self._too_long(f"{num_characters} characters cannot fit")

    def _too_long(self, found: str) -> PromptTooLongError:
        return PromptTooLongError(found, self._max_model_len)

    async def _beside(self, threads: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
