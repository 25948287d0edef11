"""Prompts to token ids without keeping the router's loop: short ones at once, others beside it."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tandem.router.text.chat import Chat, Message
from tandem.router.text.tokenizer import Tokenizer

T = TypeVar("T")

# A longer prompt is tokenized beside the event loop: this many characters take about a millisecond, and a thread's
# answer is a tenth of that away.
MAX_INLINE_CHARACTERS = 4096
# The same of a chat's messages: templates take 2 to 20 us for each.
MAX_INLINE_MESSAGES = 64
# OpenAI's own limit. Each message is an object here, and a turn of the template's loops, some of which are nested.
MAX_MESSAGES = 2048
# Texts have 3 to 5 characters for each token. Where one would have to have more than this many to fit the model's
# length, its tokens are counted piece by piece first, and no further than the length.
PLAUSIBLE_CHARACTERS_PER_TOKEN = 8
PIECE_CHARACTERS = 2**16
# A piece may begin and end within what is one token of the whole: it has no more tokens too many than this.
MAX_TOKENS_OF_CUTS = 64
# Tokenizing releases the interpreter's lock, so each of these takes a core from whoever else wants it.
MAX_ENCODING_THREADS = 4
# Of a chat's text, what tells whether a model begins with its reasoning.
MAX_ENDING_CHARACTERS = 64
# So long a prompt waits for its turn and for its tokens.
TIMEOUT_S = 60.0


class PromptEncoder:
    """Tokenizes prompts that may fit the model's length. A Frontend owns it.

    Tokenizing itself holds up nobody, for it releases the interpreter's lock. A chat's template is Python and does not:
    so it is rendered in a thread of its own, one chat at a time, and the loop has its turn every few milliseconds.

    All methods that encode raise ValueError with a message for the client, and TimeoutError if so many prompts are in
    hand that it takes longer than TIMEOUT_S.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        # This is known before the first request asks: looking through the vocabulary takes a while.
        self._max_characters = max_model_len * tokenizer.max_token_bytes
        num_threads = min(MAX_ENCODING_THREADS, os.cpu_count() or 1)
        self._encoding = ThreadPoolExecutor(num_threads, "encode")
        self._rendering = ThreadPoolExecutor(1, "render")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Args: add_special_tokens: with BOS where the model wants one."""
        return await self._encode(text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, chat: Chat | Sequence[Message], *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a conversation up to where the output begins.

        Args:
            chat: or its messages alone, each with ``role`` and ``content``.
            add_special_tokens: besides those that the template writes, BOS among them.
        """
        return (await self.render_and_encode(chat, add_special_tokens=add_special_tokens))[0]

    async def render_and_encode(
        self, chat: Chat | Sequence[Message], *, add_special_tokens: bool = False
    ) -> tuple[list[int], str]:
        """As `encode_chat`, with the last few characters of the text."""
        messages = chat.messages if isinstance(chat, Chat) else chat
        self.check_num_messages(len(messages))
        # The template writes something for an empty one too.
        num_characters = chat.num_characters if isinstance(chat, Chat) else Chat(chat).num_characters
        self._check_characters(num_characters)
        if num_characters <= MAX_INLINE_CHARACTERS and len(messages) <= MAX_INLINE_MESSAGES:
            text = self._tokenizer.render_chat(chat)
        else:
            text = await self._beside(self._rendering, self._tokenizer.render_chat, chat)
        token_ids = await self._encode(text, add_special_tokens=add_special_tokens)
        return token_ids, text[-MAX_ENDING_CHARACTERS:]

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a prompt that was sent as token ids."""
        if len(token_ids) <= MAX_INLINE_CHARACTERS:
            return self._tokenizer.decode(token_ids, skip_special_tokens)
        return await self._beside(self._encoding, self._tokenizer.decode_prompt, token_ids, skip_special_tokens)

    def check_num_messages(self, num_messages: int) -> None:
        """Of a chat, before anything is done for each of them."""
        if not num_messages:
            raise ValueError("the chat has no messages")
        if num_messages > MAX_MESSAGES:
            raise ValueError(f"the chat has {num_messages} messages; at most {MAX_MESSAGES} are taken")
        # An empty one takes at least a token too.
        if num_messages >= self._max_model_len:
            raise ValueError(
                f"the chat has {num_messages} messages, more than can fit the model's length of "
                f"{self._max_model_len} tokens"
            )

    def check_num_tokens(self, num_tokens: int) -> None:
        """Of a prompt."""
        if num_tokens >= self._max_model_len:
            raise ValueError(
                f"the prompt has {num_tokens} tokens; the model's length is {self._max_model_len}, the output's first "
                "token included"
            )

    def close(self) -> None:
        """What waits is not begun any more; what has begun ends by itself."""
        for threads in (self._encoding, self._rendering):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._check_characters(len(text))
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self._encode_at_once(text, add_special_tokens)
        return await self._beside(self._encoding, self._encode_at_once, text, add_special_tokens)

    def _encode_at_once(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > self._max_model_len * PLAUSIBLE_CHARACTERS_PER_TOKEN:
            self._check_pieces(text)
        encoding = self._tokenizer.tokenize(text, add_special_tokens)
        # The list of the ids is made with the lock held; nobody needs that of a prompt which is too long.
        self.check_num_tokens(len(encoding))
        return encoding.ids

    def _check_pieces(self, text: str) -> None:
        """Of a text that seems too long: counts its tokens until it is."""
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            encoding = self._tokenizer.tokenize(text[start : start + PIECE_CHARACTERS], False)
            num_tokens += max(0, len(encoding) - MAX_TOKENS_OF_CUTS)
            if num_tokens >= self._max_model_len:
                raise ValueError(
                    f"the prompt has more than {num_tokens} tokens; the model's length is {self._max_model_len}, the "
                    "output's first token included"
                )

    def _check_characters(self, num_characters: int) -> None:
        if num_characters > self._max_characters:
            raise ValueError(
                f"the prompt has {num_characters} characters; no more than {self._max_characters} can fit the model's "
                f"length of {self._max_model_len} tokens"
            )

    async def _beside(self, threads: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
