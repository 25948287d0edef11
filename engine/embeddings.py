"""Embeddings of prompts: pooled from the last token's hidden state, in the forward pass that reaches it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.embedding import EmbeddingParams
from tandem.engine.batch import Batch
from tandem.engine.models.base import Model

# Keeps a hidden state of zeros finite.
MIN_LENGTH = 1e-12


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """Embeddings of one forward pass, on their way to the host like SampledLogprobs.

    Attributes:
        numbers: position in the batch of each row's sequence.
        hidden: (num_rows, hidden_size) float32, after the final norm.
    """

    numbers: Sequence[int]
    params: Sequence[EmbeddingParams]
    hidden: torch.Tensor

    def to_sequences(self, num_sequences: int) -> list[bytes | None]:
        """Call once the copy has arrived."""
        found: list[bytes | None] = [None] * num_sequences
        for number, params, row in zip(self.numbers, self.params, self.hidden.numpy(), strict=True):
            values = row[: params.num_dimensions or len(row)]
            if params.is_normalized:
                values = values / max(float(np.linalg.norm(values)), MIN_LENGTH)
            found[number] = values.astype("<f4").tobytes()
        return found


def pool_prompts(model: Model, hidden: torch.Tensor, batch: Batch) -> PooledPrompts:
    """
    Args:
        hidden: (len(batch.pooled_rows()), hidden_size), output of the last layer.
    """
    numbers = [number for number, sequence in enumerate(batch.sequences) if sequence.needs_embedding]
    params = [p for number in numbers if (p := batch.sequences[number].embedding) is not None]
    return PooledPrompts(numbers, params, model.final_norm(hidden).float().to("cpu", non_blocking=True))
