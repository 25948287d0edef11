"""Attention interfaces for models and for backends.

Each page layout has an `attend` of its own: HeadAttention, LatentAttention and IndexedAttention. A new backend needs
one class and a line in engine/attention/table.py, or an import path in the configuration.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tandem.engine.attention.indexed_layout import IndexedLayout
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import Norm, QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence


class Attention:
    """Attention of one forward pass. A layer (engine/models/attention/) calls the `attend` of its model's layout."""


class HeadAttention(Attention, ABC):
    """Attention with keys and values by head, in pages of KvHeadLayout."""

    @abstractmethod
    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        """Normalizes (if qk_norm) and rotates queries and keys, writes new keys and values into their pages, then
        attends causally.

        Args:
            qkv: (num_tokens, num_q_heads + 2 * num_kv_heads, head_dim); may be overwritten.

        Returns:
            (num_tokens, num_q_heads * head_dim), in qkv's dtype.
        """


class LatentHeads(NamedTuple):
    """Makes a layer's keys and values by head of latents.

    Attributes:
        keys: (num_heads, nope_dim, kv_rank); times a latent, a key without its rotated part.
        values: (num_heads, value_dim, kv_rank); times a latent, a value.
        scale: factor of the scores.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scale: float


class LatentAttention(Attention, ABC):
    """Attention over latents, in pages of LatentLayout."""

    @abstractmethod
    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        """Normalizes the latents, rotates the last rope_dim numbers of each query and of kv, writes kv into its pages,
        then attends causally.

        Args:
            q: (num_tokens, num_heads, nope_dim + rope_dim); may be overwritten.
            kv: (num_tokens, kv_rank + rope_dim): latents, then the keys' rotated part; may be overwritten.
            norm: of the latents.

        Returns:
            (num_tokens, num_heads * value_dim), in q's dtype.
        """


class Index(NamedTuple):
    """Numbers by which queries choose tokens.

    A token's score is a weighted sum over heads: of the products of index query and index key, negative ones as 0.

    Attributes:
        queries: (num_tokens, num_index_heads, index_dim); the first rope_dim numbers are not rotated yet.
        keys: (num_tokens, index_dim); likewise.
        weights: (num_tokens, num_index_heads) float32.
        top_k: tokens that a query attends to, at most.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor
    top_k: int


class IndexedAttention(Attention, ABC):
    """Attention over chosen latents, in pages of IndexedLayout."""

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        heads: LatentHeads,
        index: Index,
        layer: int,
    ) -> torch.Tensor:
        """As LatentAttention.attend, over the top_k tokens with the largest scores; of equal ones, the first. Rotates
        halves of index queries and keys, not pairs, and writes the keys into their pages."""


class PlannedAttention(HeadAttention):
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
        """As HeadAttention.attend. Args: out: contiguous memory for the result."""


class AttentionBackend(Attention, ABC):
    """Attention over a paged pool.

    `plan` is called once per forward pass, `attend` once per layer.

    Attributes:
        layout: class of the pages that it reads.
        reads: describes them, for messages.
        reads_quantized: True if it reads quantized pages, with `kv_scales`.
        computes_mixed: True if it computes mixed steps.
        computes_drafts: True if sequences of a decode step may have drafts.
    """

    layout: type[PageLayout]
    reads: str
    reads_quantized: bool = False
    computes_mixed: bool = False
    computes_drafts: bool = False

    @classmethod
    def why_not(cls, layout: PageLayout, num_q_heads: int, device: torch.device) -> str:
        """Returns the reason this backend does not support such pages on the device, without a full stop; "" if it
        does."""
        if not isinstance(layout, cls.layout):
            return f"{cls.__name__} reads {cls.reads}, not pages of {layout.tag}"
        if isinstance(layout, KvHeadLayout | LatentLayout) and layout.quantized_to and not cls.reads_quantized:
            return f"{cls.__name__} does not read quantized pages: use kv_cache_dtype auto"
        return ""

    @abstractmethod
    def __init__(self, pool: KvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        """
        Args:
            pool: accepted by `why_not`; a CudaKvPool on a GPU.
            num_q_heads: of the model.
            kv_scales: None: all ones.
        """

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepares for the layers of one forward pass."""


class HeadBackend(AttentionBackend, HeadAttention):
    """A backend for multiples of the layout's num_kv_heads query heads."""

    layout = KvHeadLayout
    reads = "keys and values by head"


class LatentBackend(AttentionBackend, LatentAttention):
    layout = LatentLayout
    reads = "latents"


class IndexedBackend(AttentionBackend, IndexedAttention):
    layout = IndexedLayout
    reads = "latents with index keys"


class GraphedAttention(Attention, ABC):
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

    Attributes:
        graphs_new_prompts: whether graphs of large prefills are as fast as single launches.
    """

    graphs_new_prompts = False

    @abstractmethod
    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> Mapping[int, GraphedAttention]:
        """Returns attention for decode steps of fixed sizes; only one may run at a time."""

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> Mapping[int, GraphedAttention]:
        """Returns attention for decode steps of fixed numbers of tokens, drafts included; only one may run at a time.
        Called only with computes_drafts."""
        raise NotImplementedError

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> Mapping[int, GraphedAttention]:
        """Returns attention for prefills of fixed numbers of tokens, of at most `max_sequences` each; only one may run
        at a time. Empty if not supported."""
        return {}

    def for_new_prompt_graphs(self, sizes: Sequence[int], max_sequences: int) -> Mapping[int, GraphedAttention]:
        """As for_prefill_graphs, if all prompts start in the prefill: it writes pages, but reads none. Called only with
        graphs_new_prompts."""
        raise NotImplementedError

    @abstractmethod
    def joined(self, decode: GraphedAttention, prefill: GraphedAttention) -> Attention:
        """Returns attention of a mixed step of fixed sizes, decode rows first. Called only if there are prefill
        graphs."""


class GraphedHeadAttention(GraphedAttention, PlannedAttention):
    """By head."""


class GraphableHeadBackend(HeadBackend, GraphableBackend):
    @abstractmethod
    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> Mapping[int, GraphedHeadAttention]:
        """As GraphableBackend.for_graphs."""

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> Mapping[int, GraphedHeadAttention]:
        raise NotImplementedError

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> Mapping[int, GraphedHeadAttention]:
        return {}

    def for_new_prompt_graphs(self, sizes: Sequence[int], max_sequences: int) -> Mapping[int, GraphedHeadAttention]:
        raise NotImplementedError
