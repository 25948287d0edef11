"""A model directory for a router alone, and a tokenizer for models without one."""

import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MODEL_NAME = "benchmark"
MAX_MODEL_LEN = 1_000_000
# Four-letter words, about as long as English tokens, preceded by one token per byte.
WORDS = ["".join(letters) for letters in itertools.product("bdfg", "aeiou", "klmnprst", "aeiou")]
NUM_BYTES = 256
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"


def output_token(index: int) -> int:
    return NUM_BYTES + index % len(WORDS)


def token_text(token_id: int) -> str:
    return " " + WORDS[token_id - NUM_BYTES]


def write_model_dir(directory: Path) -> None:
    """Write a router's files: a byte-level tokenizer and the limits."""
    tokenizer = byte_level_tokenizer(WORDS)
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    config = {"vocab_size": vocab_size, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))


def fit_to_serve(model: str, directory: Path) -> str:
    """Copy a model without a tokenizer into `directory` with one; return the directory to serve. Raises OSError."""
    source = Path(model)
    if not (source / "config.json").is_file() or (source / "tokenizer.json").is_file():
        return model
    fit = directory / source.name
    fit.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copyfile(file, fit / file.name)
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    words = ("".join(letters) for letters in itertools.product(*(_CONSONANTS, _VOWELS) * 3))
    tokenizer = byte_level_tokenizer(itertools.islice(words, max(vocab_size - NUM_BYTES, 0)), vocab_size)
    tokenizer.save(str(fit / "tokenizer.json"))
    return str(fit)


def byte_level_tokenizer(words: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """Return a tokenizer of bytes and of words with a leading space, cut off at `vocab_size`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("Ġ" + word for word in words)][:vocab_size]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
