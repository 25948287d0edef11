"""What a model asks of attention, and what an engine asks of a backend that computes it.

A backend is one class in one file, and its line in engine/attention/table.py. One of somebody else's is taken by its
import path.
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
    """All of a layer's attention between its two projections."""

    @abstractmethod
    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        """Normalises queries and keys (if the model does), turns both, writes the new keys and values into their pages,
        then attends causally to all tokens up to each query.

        Args:
            qkv: (num_tokens, num_q_heads + 2 * num_kv_heads, head_dim), as projected; not to be used again.
            qk_norm: None for models without.
            layer: index of the layer.

        Returns:
            (num_tokens, num_q_heads * head_dim), in qkv's dtype.
        """


class PlannedAttention(Attention):
    """Attention of the sequences of one kind that it has been planned for."""

    @abstractmethod
    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention.attend. Args: out: contiguous memory of what is returned; None: it is made."""


class AttentionBackend(Attention):
    """Attention over a paged pool.

    An engine asks the class `why_not` before it makes a backend. `plan` is called once per forward, on the scheduler's
    side, and does whatever depends on lengths and page tables alone; `attend` is called once per layer.

    Attributes:
        reads_quantized: whether it takes pages of another dtype than it computes in. Then its class is made with
            `kv_scales` where there are such pages.
        computes_mixed: whether it takes batches that decode and compute prompts.
    """

    reads_quantized: bool = False
    computes_mixed: bool = False

    @classmethod
    def why_not(cls, layout: PageLayout, num_q_heads: int, device: torch.device) -> str:
        """Why this backend cannot compute attention over such pages on such a device, in a sentence without a full
        stop; "" if it can. Here is what holds for every backend that reads keys and values by head."""
        if not isinstance(layout, KvHeadLayout):
            return f"{cls.__name__} reads keys and values by head, not pages of {layout.tag}"
        if layout.quantized_to and not cls.reads_quantized:
            return f"{cls.__name__} reads pages of the dtype that it computes in, so kv_cache_dtype must be auto"
        return ""

    @abstractmethod
    def __init__(self, pool: KvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        """
        Args:
            pool: with a layout and on a device that `why_not` has nothing against; on a GPU it is a CudaKvPool.
            num_q_heads: heads of queries, a multiple of the layout's num_kv_heads.
            kv_scales: of quantized pages; None: each is one. Pages of the dtype that is computed in have none.
        """

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepares for the layers of one forward over `batch`."""


class GraphedAttention(PlannedAttention):
    """Attention of forwards of one size, whose tensors stay where they are, so that a CUDA graph of `attend` can run
    again with other contents. Rows beyond the batch's own attend to the pool's dummy page and write there.

    Attributes:
        positions: (num_tokens,) int32 on the device, of the tokens planned last; 0 for padding.
    """

    positions: torch.Tensor

    @abstractmethod
    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        """Prepares for a forward over `sequences`, of at most as many tokens as the size; none at all is a forward of
        padding."""


class GraphableBackend(AttentionBackend):
    """A backend that can also run inside CUDA graphs. Without this, an engine launches each kernel of a step.

    One that `computes_mixed` has a decode step and a prefill of fixed sizes take turns within one forward, layer by
    layer: these two must not share memory that lasts from one layer to the next.
    """

    @abstractmethod
    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedAttention]:
        """The same attention for decode steps of fixed sizes; only one of them may run at a time."""

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> dict[int, GraphedAttention]:
        """The same attention for prefills of fixed numbers of tokens, of at most `max_sequences` each; only one of them
        may run at a time. A backend that has none returns none: each kernel of a prefill is launched then."""
        return {}
