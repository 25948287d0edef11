"""Inputs to embed: their limit, and truncation on either side."""

import asyncio
from collections.abc import Callable

import pytest
from tokenizers import processors

from tandem.router.errors import RequestTooLargeError
from tandem.router.text.input_encoder import AS_MANY_AS_FIT, InputEncoder
from tandem.router.text.prompt_cut import PIECE_CHARACTERS
from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import byte_level, save

MAX_MODEL_LEN = 100
BOS, EOS = 256, 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token per byte, with one before and one after each text."""
    found = byte_level()
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return Tokenizer(save(tmp_path_factory.mktemp("model"), found))


class Beside:
    num_calls = 0

    async def __call__(self, function: Callable[[], list[int]]) -> list[int]:
        self.num_calls += 1
        return function()


def encode(
    tokenizer: Tokenizer,
    text: str,
    num_tokens: int | None = None,
    beside: Beside | None = None,
    *,
    keeps_end: bool = False,
    add_special_tokens: bool = True,
) -> list[int]:
    encoder = InputEncoder(tokenizer, MAX_MODEL_LEN, beside or Beside())
    cut = encoder.cut(num_tokens, keeps_end=keeps_end)
    return asyncio.run(encoder.encode(text, cut, add_special_tokens=add_special_tokens))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.tokenize(text, False).ids


def test_an_input_may_fill_the_models_length(tokenizer: Tokenizer) -> None:
    text = "x" * (MAX_MODEL_LEN - 2)
    assert encode(tokenizer, text) == [BOS, *ids(tokenizer, text), EOS]
    assert encode(tokenizer, "x" * MAX_MODEL_LEN, add_special_tokens=False) == ids(tokenizer, "x" * MAX_MODEL_LEN)
    with pytest.raises(RequestTooLargeError, match=r"the input has 101 tokens.* maximum context length is 100 tokens"):
        encode(tokenizer, text + "x")


@pytest.mark.parametrize("num_characters", [801, 5000, 2 * PIECE_CHARACTERS])
def test_a_far_too_long_input_is_refused(tokenizer: Tokenizer, num_characters: int) -> None:
    beside = Beside()
    with pytest.raises(RequestTooLargeError, match="maximum context length is 100 tokens"):
        encode(tokenizer, "x" * num_characters, beside=beside)
    assert beside.num_calls == (num_characters > 4096)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 10, 50, MAX_MODEL_LEN, AS_MANY_AS_FIT])
@pytest.mark.parametrize("length", [5, 90, 300, 5000])
@pytest.mark.parametrize("keeps_end", [False, True])
def test_truncated_inputs_keep_their_special_tokens(
    tokenizer: Tokenizer, num_tokens: int, length: int, keeps_end: bool
) -> None:
    text = "".join(chr(97 + position % 26) for position in range(length))
    limit = MAX_MODEL_LEN if num_tokens == AS_MANY_AS_FIT else num_tokens
    num_kept = max(0, limit - 2)
    kept = text[max(0, length - num_kept) :] if keeps_end else text[:num_kept]
    found = encode(tokenizer, text, num_tokens, keeps_end=keeps_end)
    assert found == [BOS, *ids(tokenizer, kept), EOS][:limit]
    kept = text[max(0, length - limit) :] if keeps_end else text[:limit]
    found = encode(tokenizer, text, num_tokens, keeps_end=keeps_end, add_special_tokens=False)
    assert found == ids(tokenizer, kept)


def test_of_a_huge_text_only_the_kept_end_is_read(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(chr(97 + position % 26) for position in range(20 * PIECE_CHARACTERS + 7))
    num_read = 0
    tokenize = tokenizer.tokenize

    def counted(part: str, add_special_tokens: bool) -> object:
        nonlocal num_read
        num_read += len(part)
        return tokenize(part, add_special_tokens)

    monkeypatch.setattr(tokenizer, "tokenize", counted)
    assert encode(tokenizer, text, 10, add_special_tokens=False) == ids(tokenizer, text[:10])
    last = encode(tokenizer, text, 10, keeps_end=True, add_special_tokens=False)
    assert last == ids(tokenizer, text[-10:])
    with pytest.raises(RequestTooLargeError):
        encode(tokenizer, text)
    assert num_read < 6 * PIECE_CHARACTERS


@pytest.mark.parametrize("num_tokens", [0, -2, MAX_MODEL_LEN + 1])
def test_other_truncations_are_refused(tokenizer: Tokenizer, num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"at most 100 tokens can be kept, not {num_tokens}"):
        encode(tokenizer, "x", num_tokens)


def test_token_ids_are_cut_as_they_are(tokenizer: Tokenizer) -> None:
    encoder = InputEncoder(tokenizer, MAX_MODEL_LEN, Beside())
    given = list(range(150))
    assert encoder.fitted(given, encoder.cut(10, keeps_end=False)) == given[:10]
    assert encoder.fitted(given, encoder.cut(10, keeps_end=True)) == given[-10:]
    assert encoder.fitted(given, encoder.cut(AS_MANY_AS_FIT, keeps_end=False)) == given[:100]
    assert encoder.fitted(given[:100], None) == given[:100]
    assert encoder.fitted([], encoder.cut(3, keeps_end=False)) == []
    with pytest.raises(RequestTooLargeError, match="101 tokens"):
        encoder.fitted(given[:101], None)
