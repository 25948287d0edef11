"""A model directory for a router, and the output that everybody gets: words of four letters with a space before each,
about as long as tokens of English text are."""

import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MODEL_NAME = "benchmark"
MAX_MODEL_LEN = 1_000_000
WORDS = ["".join(letters) for letters in itertools.product("bdfg", "aeiou", "klmnprst", "aeiou")]
# The tokens before the words are one for each byte.
NUM_BYTES = 256


def output_token(index: int) -> int:
    """The token at this index of every output."""
    return NUM_BYTES + index % len(WORDS)


def token_text(token_id: int) -> str:
    return " " + WORDS[token_id - NUM_BYTES]


def write_model_dir(directory: Path) -> None:
    """Writes all that a router reads of a model: a byte-level tokenizer and the limits."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("Ġ" + word for word in WORDS)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"vocab_size": len(tokens), "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))
