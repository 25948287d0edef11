"""Models by the names that benchmarks are given, made fit to be served."""

import itertools
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"


def fit_to_serve(model: str, directory: Path) -> str:
    """A model's directory without a tokenizer, which a router needs, is copied with one; all others stay as they are.

    Args:
        directory: where the copy goes.

    Raises:
        OSError: it cannot be copied.
    """
    source = Path(model)
    if not (source / "config.json").is_file() or (source / "tokenizer.json").is_file():
        return model
    fit = directory / source.name
    fit.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copyfile(file, fit / file.name)
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    made_up_tokenizer(vocab_size).save(str(fit / "tokenizer.json"))
    return str(fit)


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level, with words that nobody knows, so that tokens have texts about as long as those of English."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS)
    words = ("Ġ" + "".join(word) for word in itertools.product(*letters))
    tokens = [*alphabet, *itertools.islice(words, max(vocab_size - len(alphabet), 0))][:vocab_size]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
