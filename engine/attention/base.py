"""Attention interfaces for models and for backends.

A new backend needs one class and a line in engine/attention/table.py, or an import path in the configuration.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence


class Attention(ABC):
    @abstractmethod
    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        """Normalizes (if qk_norm) and rotates queries and keys, writes new keys and values into their pages, then
        attends causally.

        Args:
            qkv: (num_tokens, num_q_heads + 2 * num_kv_heads, head_dim); may be overwritten.

        Returns:
            (num_tokens, num_q_heads * head_dim), in qkv's dtype.
        """


class PlannedAttention(Attention):
    """Attention planned for decode or prefill sequences."""

    @abstractmethod
    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As Attention.attend. Args: out: contiguous memory for the result."""


class AttentionBackend(Attention):
    """Attention over a paged pool.

    `plan` is called once per forward pass, `attend` once per layer.

    Attributes:
        reads_quantized: True if it reads quantized pages, with `kv_scales`.
        computes_mixed: True if it computes mixed steps.
    """

    reads_quantized: bool = False
    computes_mixed: bool = False

    @classmethod
    def why_not(cls, layout: PageLayout, num_q_heads: int, device: torch.device) -> str:
        """Returns the reason this backend does not support such pages on the device, without a full stop; "" if it
        does."""
        if not isinstance(layout, KvHeadLayout):
            return f"{cls.__name__} reads keys and values by head, not pages of {layout.tag}"
        if layout.quantized_to and not cls.reads_quantized:
            return f"{cls.__name__} does not read quantized pages: use kv_cache_dtype auto"
        return ""

    @abstractmethod
    def __init__(self, pool: KvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        """
        Args:
            pool: accepted by `why_not`; a CudaKvPool on a GPU.
            num_q_heads: a multiple of the layout's num_kv_heads.
            kv_scales: None: all ones.
        """

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepares for the layers of one forward pass."""


class GraphedAttention(PlannedAttention):
    """Attention of one forward size with fixed tensors, for replay of a captured CUDA graph.

    Attributes:
        positions: (num_tokens,) int32 on the device; 0 for padding, which uses the dummy page.
    """

    positions: torch.Tensor

    @abstractmethod
    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        """Prepares for a forward pass over `sequences`, possibly none, padded to the size."""


class GraphableBackend(AttentionBackend):
    """A backend for CUDA graphs.

    With `computes_mixed`, a decode step and a prefill of fixed sizes alternate layer by layer. They must not share
    memory that lasts from one layer to the next.
    """

    @abstractmethod
    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedAttention]:
        """Returns attention for decode steps of fixed sizes; only one may run at a time."""

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> dict[int, GraphedAttention]:
        """Returns attention for prefills of fixed numbers of tokens, of at most `max_sequences` each; only one may run
        at a time. Empty if not supported."""
        return {}
