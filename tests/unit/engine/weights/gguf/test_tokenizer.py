import pytest

from tandem.engine.weights.gguf.tokenizer import build_tokenizer, tokenizer_config
from tests.fakes.gguf_tokenizer import BOS, EOT, TOKENIZER, TOKENS


@pytest.mark.parametrize(
    ("pre", "pieces"),
    {
        "gpt-2": ["I", "'", "M", "Ġ12345", "ĊĊ", "Ġx"],
        "smollm": ["I", "'", "M", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġx"],
        "llama-bpe": ["I", "'M", "Ġ", "123", "45", "ĊĊ", "Ġx"],
        "qwen2": ["I", "'M", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġx"],
        "olmo": ["I", "'", "M", "Ġ12345", "ĊĊ", "Ġx"],
    }.items(),
)
def test_each_pre_tokenizer_splits_its_own_way(pre: str, pieces: list[str]) -> None:
    tokenizer = build_tokenizer(TOKENIZER | {"tokenizer.ggml.pre": pre})
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'M 12345\n\n x")] == pieces


def test_special_tokens_and_bos_follow_the_metadata() -> None:
    tokenizer = build_tokenizer(TOKENIZER)
    ids = tokenizer.encode(" the<eot><tool>").ids
    assert ids == [BOS, TOKENS.index("Ġthe"), EOT, TOKENS.index("<tool>")]
    assert tokenizer.decode(ids) == " the<tool>"
    plain = build_tokenizer(TOKENIZER | {"tokenizer.ggml.add_bos_token": False})
    assert plain.encode(" the").ids == [TOKENS.index("Ġthe")]


@pytest.mark.parametrize(("pre", "is_composed"), [("qwen2", True), ("olmo", True), ("gpt-2", False)])
def test_some_models_compose_characters(pre: str, is_composed: bool) -> None:
    tokenizer = build_tokenizer(TOKENIZER | {"tokenizer.ggml.pre": pre})
    composed, decomposed = (tokenizer.encode(text).tokens for text in ("\u00e9", "e\u0301"))
    assert composed == ["Ã", "©"]
    assert (decomposed == composed) is is_composed


@pytest.mark.parametrize("pre", ["qwen2", "olmo"])
def test_only_llama_3_adds_bos_unasked(pre: str) -> None:
    silent = {"tokenizer.ggml.pre": pre}
    assert BOS not in build_tokenizer(TOKENIZER | silent).encode(" the").ids
    assert tokenizer_config(TOKENIZER | silent, 128)["add_bos_token"] is False
    assert tokenizer_config(TOKENIZER, 128)["add_bos_token"] is True
    asked = build_tokenizer(TOKENIZER | silent | {"tokenizer.ggml.add_bos_token": True})
    assert asked.encode(" the").ids == [BOS, TOKENS.index("Ġthe")]


def test_runs_of_spaces_are_tokens_of_olmo() -> None:
    tokens = [*TOKENS, "   ", "  "]
    metadata = TOKENIZER | {
        "tokenizer.ggml.pre": "olmo",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(TOKENS) + [4, 4],
    }
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode("     the").ids == [len(TOKENS), len(TOKENS) + 1, tokens.index("t"), tokens.index("he")]
    assert tokenizer.decode(tokenizer.encode("a     the").ids) == "a     the"
