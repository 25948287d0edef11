import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding

from tandem.router.text import prompt_encoder
from tandem.router.text.chat import Chat
from tandem.router.text.prompt_cut import PIECE_CHARACTERS
from tandem.router.text.prompt_encoder import (
    MAX_INLINE_CHARACTERS,
    MAX_INLINE_MESSAGES,
    MAX_MESSAGES,
    PromptEncoder,
)
from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import CHATML, byte_level, save, sentencepiece

LONG_TOKEN = "two words"


class SpyTokenizer(Tokenizer):
    """Attributes: threads: threads that tokenized or rendered."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        self.threads: list[str] = []
        self.num_characters = 0
        self.may_tokenize = threading.Event()
        self.may_tokenize.set()

    def tokenize(self, text: str, add_special_tokens: bool) -> Encoding:
        self.may_tokenize.wait(10)
        self.threads.append(threading.current_thread().name)
        self.num_characters += len(text)
        return super().tokenize(text, add_special_tokens)

    def render_chat(self, messages: Chat | Sequence[dict[str, Any]]) -> str:
        self.threads.append(threading.current_thread().name)
        return super().render_chat(messages)

    def decode_prompt(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.threads.append(threading.current_thread().name)
        return super().decode_prompt(token_ids, skip_special_tokens)


@pytest.fixture(params=[byte_level, sentencepiece], ids=["bytes", "sentencepiece"])
def any_tokenizer(tmp_path: Path, request: pytest.FixtureRequest) -> SpyTokenizer:
    return SpyTokenizer(save(tmp_path, request.param(), chat_template=CHATML))


@pytest.fixture
def tokenizer(tmp_path: Path) -> SpyTokenizer:
    return SpyTokenizer(save(tmp_path, byte_level(bos=True), chat_template=CHATML))


def test_long_text_is_tokenized_in_a_thread(any_tokenizer: SpyTokenizer) -> None:
    text = "the 日本 é two words\n" * MAX_INLINE_CHARACTERS
    expected = any_tokenizer._tokenizer.encode(text).ids
    ids = asyncio.run(PromptEncoder(any_tokenizer, len(expected) + 1).encode(text))
    assert ids == expected
    assert [name.split("_")[0] for name in any_tokenizer.threads] == ["encode"]


def test_short_prompt_is_tokenized_inline(tokenizer: SpyTokenizer) -> None:
    async def scenario() -> None:
        encoder = PromptEncoder(tokenizer, 10_000)
        assert await encoder.encode("x" * MAX_INLINE_CHARACTERS) == tokenizer.encode("x" * MAX_INLINE_CHARACTERS)
        messages = [{"role": "user", "content": "hi"}] * MAX_INLINE_MESSAGES
        assert await encoder.encode_chat(messages) == tokenizer.encode_chat(messages)
        assert await encoder.decode([65, 66]) == tokenizer.decode([65, 66])

    asyncio.run(scenario())
    assert set(tokenizer.threads) == {threading.current_thread().name}


@pytest.mark.parametrize(("num_messages", "content"), [(MAX_INLINE_MESSAGES + 1, ""), (1, "x" * MAX_INLINE_CHARACTERS)])
def test_long_chat_is_rendered_in_a_thread(tokenizer: SpyTokenizer, num_messages: int, content: str) -> None:
    messages = [{"role": "user", "content": content}] * num_messages
    expected = tokenizer.encode_chat(messages)
    tokenizer.threads.clear()
    assert asyncio.run(PromptEncoder(tokenizer, 10_000).encode_chat(messages)) == expected
    assert tokenizer.threads[0].startswith("render")


def test_long_prompt_is_decoded_in_a_thread(tokenizer: SpyTokenizer) -> None:
    ids = tokenizer.encode("é" * MAX_INLINE_CHARACTERS)
    text = asyncio.run(PromptEncoder(tokenizer, 10_000).decode(ids))
    assert text == "é" * MAX_INLINE_CHARACTERS
    assert tokenizer.threads[-1].startswith("encode")


def test_event_loop_runs_during_tokenization(tokenizer: SpyTokenizer) -> None:
    async def scenario() -> int:
        encoder = PromptEncoder(tokenizer, 10**6)
        task = asyncio.create_task(encoder.encode("words " * 100_000))
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        return num_turns

    # Takes some 100 ms. Under the GIL there would be two turns.
    assert asyncio.run(scenario()) > 20


def test_fitting_text_of_long_tokens_is_served(tokenizer: SpyTokenizer) -> None:
    num_tokens = 2 * PIECE_CHARACTERS // len(LONG_TOKEN)
    # Plus BOS.
    encoder = PromptEncoder(tokenizer, num_tokens + 2)
    ids = asyncio.run(encoder.encode(LONG_TOKEN * num_tokens))
    assert len(ids) == num_tokens + 1


def test_oversized_text_of_long_tokens_is_refused(tokenizer: SpyTokenizer) -> None:
    num_tokens = 2 * PIECE_CHARACTERS // len(LONG_TOKEN)
    with pytest.raises(ValueError, match=f"the prompt is too long: {num_tokens + 1} tokens > {num_tokens} maximum"):
        asyncio.run(PromptEncoder(tokenizer, num_tokens + 1).encode(LONG_TOKEN * num_tokens))


def test_oversized_text_is_tokenized_partly(tokenizer: SpyTokenizer) -> None:
    max_model_len = 20_000
    text = "x" * (max_model_len * tokenizer.max_token_bytes)
    with pytest.raises(ValueError, match=r"> 19999 maximum; this model's maximum context length is 20000 tokens"):
        asyncio.run(PromptEncoder(tokenizer, max_model_len).encode(text))
    assert tokenizer.num_characters == PIECE_CHARACTERS < len(text) / 10
    with pytest.raises(ValueError, match=f"{len(text) + 1} characters cannot fit"):
        asyncio.run(PromptEncoder(tokenizer, max_model_len).encode(text + "x"))
    assert tokenizer.num_characters == PIECE_CHARACTERS


@pytest.mark.parametrize(
    ("num_messages", "max_model_len", "message"),
    [
        (0, 400, "no messages"),
        (400, 400, "400 messages cannot fit; this model's maximum context length is 400 tokens"),
        (MAX_MESSAGES + 1, 10**6, f"the chat has {MAX_MESSAGES + 1} messages; at most {MAX_MESSAGES} are taken"),
    ],
)
def test_number_of_messages(tokenizer: SpyTokenizer, num_messages: int, max_model_len: int, message: str) -> None:
    encoder = PromptEncoder(tokenizer, max_model_len)
    encoder.check_num_messages(min(max_model_len - 1, MAX_MESSAGES))
    with pytest.raises(ValueError, match=message):
        asyncio.run(encoder.encode_chat([{"role": "user", "content": ""}] * num_messages))
    assert tokenizer.threads == []


def test_encoding_times_out(tokenizer: SpyTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_encoder, "TIMEOUT_S", 0.05)
    tokenizer.may_tokenize.clear()
    encoder = PromptEncoder(tokenizer, 10_000)
    try:
        with pytest.raises(TimeoutError):
            asyncio.run(encoder.encode("x" * (MAX_INLINE_CHARACTERS + 1)))
    finally:
        tokenizer.may_tokenize.set()


def test_close_cancels_waiting_work(tokenizer: SpyTokenizer) -> None:
    encoder = PromptEncoder(tokenizer, 10_000)
    encoder.close()
    with pytest.raises(RuntimeError):
        asyncio.run(encoder.encode("x" * (MAX_INLINE_CHARACTERS + 1)))
