"""Metadata of a tiny byte-level tokenizer in a GGUF file."""

from typing import Any

from tokenizers import pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, "Ġt", "he", "Ġthe", "<s>", "</s>", "<eot>", "<tool>"]
BOS, EOS, EOT = (TOKENS.index(token) for token in ("<s>", "</s>", "<eot>"))
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 4) + [3, 3, 3, 4],
    "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": EOS,
    "tokenizer.ggml.eot_token_id": EOT,
}
