"""Builds a Hugging Face tokenizer from the metadata of a GGUF file.

Only byte-level BPE (``tokenizer.ggml.model = gpt2``) is supported. An unknown pre-tokenizer is refused: a guess would
quietly cost quality.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

Metadata = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    """The pattern of Llama 3 and Qwen 2, which group digits differently."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


class _PreTokenizer(NamedTuple):
    """
    Attributes:
        is_normalized: True if texts are brought into Unicode's form NFC.
        keeps_words: True if a whole word of the vocabulary is kept even if no merges lead to it.
        adds_bos: True if a missing add_bos_token means yes.
    """

    split: Callable[[], pre_tokenizers.PreTokenizer]
    is_normalized: bool = False
    keeps_words: bool = False
    adds_bos: bool = False


_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "gpt-2": _PreTokenizer(_gpt2),
    "default": _PreTokenizer(_gpt2),
    "smollm": _PreTokenizer(_smollm),
    "llama-bpe": _PreTokenizer(lambda: _split(r"\p{N}{1,3}"), keeps_words=True, adds_bos=True),
    "qwen2": _PreTokenizer(lambda: _split(r"\p{N}"), is_normalized=True),
    "olmo": _PreTokenizer(_gpt2, is_normalized=True),
}


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Builds the tokenizer of a GGUF's ``tokenizer.ggml.*`` metadata.

    Control tokens become special tokens, user-defined ones plain added tokens.

    Raises:
        ValueError: a tokenizer model other than gpt2, an unknown pre-tokenizer, or inconsistent metadata.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"the GGUF's tokenizer model is {reprlib.repr(kind)}; only byte-level BPE ('gpt2') is supported: "
            "use the model's Hugging Face directory instead"
        )
    pre = _pre_tokenizer(metadata)
    check_tokens(metadata)
    tokens, merges = metadata["tokenizer.ggml.tokens"], _texts(metadata, "tokenizer.ggml.merges")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        bpe = models.BPE(
            vocab=vocabulary,
            merges=[_pair(merge) for merge in merges],
            ignore_merges=pre.keeps_words,
        )
    # The tokenizers library raises bare Exception.
    except Exception as error:
        raise ValueError(f"the GGUF's vocabulary and merges do not fit together: {error}") from error

    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre.split()
    tokenizer.decoder = decoders.ByteLevel()
    if pre.is_normalized:
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(tokenizer, tokens, _types(metadata, len(tokens)))
    _add_post_processor(tokenizer, metadata)
    return tokenizer


def tokenizer_config(metadata: Metadata, max_length: int) -> dict[str, Any]:
    """Returns the content of ``tokenizer_config.json``.

    Args:
        max_length: of a sequence, in tokens.

    Raises:
        ValueError: a special token's id is outside the vocabulary, or the metadata is malformed.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(metadata),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (token := _special_token(metadata, theirs)) is not None:
            config[f"{ours}_token"] = token
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        if not isinstance(template, str):
            raise ValueError(f"the GGUF's tokenizer.chat_template must be a text, not {reprlib.repr(template)}")
        config["chat_template"] = template
    return config


def check_tokens(metadata: Metadata) -> None:
    """Raises ValueError: there is no vocabulary of different texts."""
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise ValueError("the GGUF's vocabulary (tokenizer.ggml.tokens) holds a token twice")


def token_id(metadata: Metadata, name: str) -> int | None:
    """Returns the id of a special token, or None. Raises ValueError: it is outside the vocabulary."""
    index, num_tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), len(metadata["tokenizer.ggml.tokens"])
    # type(): bool is an int in Python.
    if index is not None and (type(index) is not int or not 0 <= index < num_tokens):
        raise ValueError(f"the GGUF's {name} token id {reprlib.repr(index)} is outside its vocabulary of {num_tokens}")
    return index


def _pre_tokenizer(metadata: Metadata) -> _PreTokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"the GGUF's pre-tokenizer (tokenizer.ggml.pre) is {reprlib.repr(pre)}; known: {', '.join(_PRE_TOKENIZERS)}"
        )
    return _PRE_TOKENIZERS[pre]


def _texts(metadata: Metadata, key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"the GGUF has no {key}")
    if not all(isinstance(item, str) for item in value):
        raise ValueError(f"the GGUF's {key} must be a list of texts, not {reprlib.repr(value)}")
    return value


def _types(metadata: Metadata, num_tokens: int) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return []
    if not isinstance(types, list) or len(types) != num_tokens or not all(type(kind) is int for kind in types):
        raise ValueError(
            f"the GGUF's tokenizer.ggml.token_type must be a list of {num_tokens} numbers, one for each token"
        )
    return types


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _special_token(metadata: Metadata, name: str) -> str | None:
    index = token_id(metadata, name)
    if index is None:
        return None
    token: str = metadata["tokenizer.ggml.tokens"][index]
    return token


def _adds_bos(metadata: Metadata) -> bool:
    return _flag(metadata, "tokenizer.ggml.add_bos_token", default=_pre_tokenizer(metadata).adds_bos)


def _flag(metadata: Metadata, key: str, *, default: bool = False) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"the GGUF's {key} must be true or false, not {reprlib.repr(value)}")
    return value


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    plain = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _add_post_processor(tokenizer: Tokenizer, metadata: Metadata) -> None:
    if _flag(metadata, "tokenizer.ggml.add_eos_token"):
        raise ValueError("the GGUF wants EOS at the end of every prompt: it is no model for text generation")
    if not _adds_bos(metadata):
        return
    bos = _special_token(metadata, "bos")
    if bos is None:
        raise ValueError("the GGUF wants BOS before every prompt but names no tokenizer.ggml.bos_token_id")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
