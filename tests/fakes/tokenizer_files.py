"""Model directories with every kind of tokenizer."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def save(directory: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, **more: Any) -> Path:
    """Save a model directory for ``tokenizer``; ``more`` goes to tokenizer_config.json."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    defaults = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 64, "eos_token_id": 7}
    (directory / "config.json").write_text(json.dumps(defaults | (config or {})))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **more}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_level(bos: bool = False) -> Tokenizer:
    """Return a tokenizer with a token per byte, two special tokens and two added text tokens."""
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("two words")])
    if bos:
        single = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
        tokenizer.post_processor = single
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Return a tokenizer with space-marked pieces, byte tokens for other characters, and the byte-level alphabet."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "▁▁", "▁a", "▁the", "a", "é", "\ufffd", "\n", "##ing", "end</w>", ".", "日本"]
    letters = [letter for letter in ALPHABET if letter not in {"é", "a", "."}]
    tokens = ["<s>", "</s>", *bytes_, *words, *letters]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "▁"), ("▁", "a")], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


DECODERS = {
    "sentencepiece": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "byte fallback": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "word pieces": decoders.WordPiece(),
    "word ends": decoders.BPEDecoder("</w>"),
    "bytes in a sequence": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    "none": None,
}
