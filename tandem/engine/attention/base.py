"""What a model asks of an attention backend."""

from abc import ABC, abstractmethod

import torch

from tandem.engine.batch import Batch


class AttentionBackend(ABC):
    """Attention over a paged pool.

    `plan` is called once per forward, on the scheduler's side, and does whatever depends on lengths and page tables
    alone; `run` is called once per layer.
    """

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepares for the layers of one forward over `batch`."""

    @abstractmethod
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Writes the new keys and values into their pages, then attends causally to all tokens up to each query.

        Args:
            q: (num_tokens, num_q_heads, head_dim), rotary embedding applied.
            k, v: (num_tokens, num_kv_heads, head_dim), rotary embedding applied to k.
            layer: index of the layer.

        Returns:
            (num_tokens, num_q_heads * head_dim), in q's dtype.
        """
