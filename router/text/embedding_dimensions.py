"""Sizes of a model's embeddings, from its config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class EmbeddingDimensions:
    """
    Attributes:
        num_dimensions: of a whole embedding; 0 if unknown.
        may_be_cut: whether the model was trained to have the last dimensions cut off (Matryoshka).
        allowed: the only sizes to cut to; empty for any.
    """

    num_dimensions: int = 0
    may_be_cut: bool = False
    allowed: tuple[int, ...] = ()

    def check(self, wanted: int) -> None:
        """Raises ValueError."""
        if wanted == self.num_dimensions:
            return
        if not self.may_be_cut:
            raise ValueError(
                f"this model's embeddings are not made to be cut to {wanted} dimensions: leave out dimensions, or "
                "serve a model with is_matryoshka or matryoshka_dimensions in its config.json"
            )
        if self.allowed and wanted not in self.allowed:
            raise ValueError(f"dimensions must be one of {', '.join(map(str, self.allowed))}, not {wanted}")
        if self.num_dimensions and wanted > self.num_dimensions:
            raise ValueError(f"dimensions must be at most {self.num_dimensions}, not {wanted}")


def read_embedding_dimensions(model_dir: Path) -> EmbeddingDimensions:
    """Raises ValueError for a malformed value."""
    path = model_dir / "config.json"
    config: Any = json.loads(path.read_text(encoding="utf-8"))
    allowed = config.get("matryoshka_dimensions") or ()
    if not isinstance(allowed, list | tuple) or any(type(size) is not int or size <= 0 for size in allowed):
        raise ValueError(f"{path}: matryoshka_dimensions must be a list of positive integers, not {allowed!r:.100}")
    hidden_size = config.get("hidden_size")
    return EmbeddingDimensions(
        hidden_size if type(hidden_size) is int and hidden_size > 0 else 0,
        bool(config.get("is_matryoshka")) or bool(allowed),
        tuple(sorted(allowed)),
    )
