"""Embeddings: the last hidden state of a prompt's last token, after the model's final norm."""

from dataclasses import dataclass

# Of one request.
MAX_INPUTS = 2048


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """
    Attributes:
        num_dimensions: leading dimensions to keep; 0 for all.
        is_normalized: whether the kept dimensions are scaled to length 1.
    """

    num_dimensions: int = 0
    is_normalized: bool = True
