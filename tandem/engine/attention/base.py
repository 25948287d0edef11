"""What a model asks of an attention backend."""

from abc import ABC, abstractmethod

import torch

from tandem.engine.batch import Batch
from tandem.engine.layers.norm import QkNorm, rms_norm
from tandem.engine.layers.rotary import Rotation, rotate


class AttentionBackend(ABC):
    """Attention over a paged pool.

    `plan` is called once per forward, on the scheduler's side, and does whatever depends on lengths and page tables
    alone; `run` is called once per layer.
    """

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepares for the layers of one forward over `batch`."""

    def attend(
        self, qkv: torch.Tensor, num_q_heads: int, rotation: Rotation, qk_norm: QkNorm | None, layer: int
    ) -> torch.Tensor:
        """All of a layer's attention between its two projections. A backend may have fewer kernels for it.

        Args:
            qkv: (num_tokens, num_q_heads + 2 * num_kv_heads, head_dim), as projected.
            qk_norm: None for models without.

        Returns:
            (num_tokens, num_q_heads * head_dim).
        """
        num_kv_heads = (qkv.shape[1] - num_q_heads) // 2
        # Queries and keys go the same way, so together: (num_tokens, num_q_heads + num_kv_heads, head_dim).
        qk, v = qkv.split([num_q_heads + num_kv_heads, num_kv_heads], dim=1)
        if qk_norm is not None:
            q_weight, k_weight = qk_norm.weight
            weights = [q_weight.expand(num_q_heads, -1), k_weight.expand(num_kv_heads, -1)]
            qk = rms_norm(qk, torch.cat(weights), qk_norm.eps)
        q, k = rotate(qk, *rotation.cos_sin).split([num_q_heads, num_kv_heads], dim=1)
        return self.run(q, k, v, layer)

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
