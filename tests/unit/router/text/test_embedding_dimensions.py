"""Sizes that a model's embeddings may be cut to."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.router.text.embedding_dimensions import EmbeddingDimensions, read_embedding_dimensions


def read(tmp_path: Path, **config: Any) -> EmbeddingDimensions:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_embedding_dimensions(tmp_path)


def test_a_plain_model_is_not_cut(tmp_path: Path) -> None:
    sizes = read(tmp_path, hidden_size=64)
    sizes.check(64)
    with pytest.raises(ValueError, match="not made to be cut to 32 dimensions"):
        sizes.check(32)


def test_a_matryoshka_is(tmp_path: Path) -> None:
    sizes = read(tmp_path, hidden_size=64, is_matryoshka=True)
    sizes.check(1)
    sizes.check(63)
    with pytest.raises(ValueError, match="at most 64, not 65"):
        sizes.check(65)


def test_only_to_its_own_sizes(tmp_path: Path) -> None:
    sizes = read(tmp_path, hidden_size=64, matryoshka_dimensions=[32, 16])
    sizes.check(32)
    sizes.check(64)
    with pytest.raises(ValueError, match="one of 16, 32, not 17"):
        sizes.check(17)


@pytest.mark.parametrize("sizes", [[0], ["32"], 32, [True]])
def test_malformed_sizes_are_refused(tmp_path: Path, sizes: Any) -> None:
    with pytest.raises(ValueError, match="matryoshka_dimensions must be a list of positive integers"):
        read(tmp_path, hidden_size=64, matryoshka_dimensions=sizes)


def test_nothing_is_known() -> None:
    with pytest.raises(ValueError, match="not made to be cut"):
        EmbeddingDimensions().check(8)
