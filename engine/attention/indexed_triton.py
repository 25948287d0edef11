"""Attention over chosen latents by Tandem's kernels in decode steps. Needs CUDA."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.attention.base import Index, LatentHeads
from tandem.engine.attention.indexed_layout import IndexedLayout
from tandem.engine.attention.indexed_reference import IndexedReferenceAttention, Places
from tandem.engine.attention.latent_kernels import attend
from tandem.engine.attention.latent_layout import LatentPages
from tandem.engine.attention.latent_plan import decode_plans
from tandem.engine.attention.latent_triton import LatentTritonAttention
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed

# A token's latent begins at a multiple of so many numbers. Kernels take these multiples as pages of one token.
UNIT = 16


class _Decode(NamedTuple):
    """
    Attributes:
        places: (batch, kv_len), padded by the first token.
        is_padding: (batch, kv_len) bool.
        lengths: of each sequence, tokens.
    """

    places: Places
    is_padding: torch.Tensor
    lengths: list[int]


class _Sums(NamedTuple):
    """
    Attributes:
        at: (num_chosen,) int64, each sequence's choice among padded ones, in turn.
        items, merges: of LatentPlan.
        num_parts, tile_rows: of the kernel's memory.
        most_parts: of LatentPlans.
    """

    at: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    num_parts: int
    tile_rows: int
    most_parts: int


class IndexedTritonAttention(IndexedReferenceAttention):
    """Torch scores tokens in decode steps, and the kernels of latents read those chosen. Prompts run in plain torch."""

    computes_drafts = False

    @classmethod
    def why_not(cls, layout: PageLayout, num_q_heads: int, device: torch.device) -> str:
        if not isinstance(layout, IndexedLayout):
            return super().why_not(layout, num_q_heads, device)
        if layout.index_dim % UNIT:
            return f"the Triton kernels of latents compute multiples of {UNIT}, not index_head_dim {layout.index_dim}"
        return LatentTritonAttention.why_not(layout.latents, num_q_heads, device)

    def __init__(self, pool: CudaKvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        super().__init__(pool, num_q_heads)
        self._num_heads = num_q_heads
        self._num_programs = torch.cuda.get_device_properties(self._device).multi_processor_count
        pages, token_dim = pool.memory.view(getattr(torch, self._layout.dtype)), self._layout.latents.token_dim
        self._numbers_per_page = pages.stride(0)
        num_numbers = (len(pages) - 1) * self._numbers_per_page + pages.shape[1]
        num_units = (num_numbers - token_dim) // UNIT + 1
        units = pages.as_strided((num_units, 1, 1, token_dim), (UNIT, 0, token_dim, 1))
        self._units = LatentPages(*units.tensor_split((self._layout.kv_rank,), dim=-1))
        self._decode: _Decode | None = None
        # Made in the first layer, which knows how many tokens are chosen.
        self._sums: _Sums | None = None

    @torch.inference_mode()
    def plan(self, batch: Batch) -> None:
        self._plan_writing(batch)
        self._sums = None
        self._decode = self._plan_decode(batch.decoded) if batch.decoded else None
        self._plan_each(batch.prompts, len(batch.decoded))

    def _attend_each(
        self, q: torch.Tensor, queries: torch.Tensor, heads: LatentHeads, index: Index, layer: int
    ) -> list[torch.Tensor]:
        outputs = super()._attend_each(q, queries, heads, index, layer)
        if self._decode is not None:
            outputs.insert(0, self._attend_decoded(self._decode, q, queries, heads, index, layer))
        return outputs

    def _plan_decode(self, sequences: Sequence[TokenSequence]) -> _Decode:
        lengths = [s.device_len for s in sequences]
        tokens = torch.arange(max(lengths), device=self._device)
        each = [self._places(s, tokens[: s.device_len]) for s in sequences]
        pages, offsets = (
            torch.nn.utils.rnn.pad_sequence(list(of_each), batch_first=True) for of_each in zip(*each, strict=True)
        )
        is_padding = tokens >= torch.tensor(lengths, device=self._device)[:, None]
        # Page 0 may hold another sequence's NaN.
        pages = torch.where(is_padding, pages[:, :1], pages)
        return _Decode(Places(pages, offsets), is_padding, lengths)

    def _attend_decoded(
        self, decode: _Decode, q: torch.Tensor, queries: torch.Tensor, heads: LatentHeads, index: Index, layer: int
    ) -> torch.Tensor:
        """Args: q, queries: of `_write`, of all tokens."""
        layout, batch_size = self._layout, len(decode.lengths)
        pages, offsets = decode.places
        keys = self._index_keys[pages, layer, offsets].float()  # (batch, kv_len, index_dim)
        products = (queries[:batch_size].float() @ keys.transpose(1, 2)).relu_()
        scores = (index.weights[:batch_size, None] @ products)[:, 0].masked_fill_(decode.is_padding, float("-inf"))
        # In their order, so that equal choices are equal sums; padding comes last.
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : index.top_k].sort(dim=-1).values
        begins = pages * self._numbers_per_page + (layer * layout.page_size + offsets) * layout.latents.token_dim
        units = (begins // UNIT).gather(1, chosen).flatten()
        if self._sums is None:
            num_chosen = [min(length, index.top_k) for length in decode.lengths]
            self._sums = self._plan_sums(num_chosen, chosen.shape[1])
        nope_dim = q.shape[-1] - layout.rope_dim
        absorbed = torch.bmm(q[:batch_size, :, :nope_dim].transpose(0, 1), heads.keys)
        latents = self._weighted_sums(absorbed, q[:batch_size, :, nope_dim:], units, self._sums, heads.scale)
        return torch.bmm(latents, heads.values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _weighted_sums(
        self, absorbed: torch.Tensor, q_rope: torch.Tensor, units: torch.Tensor, sums: _Sums, scale: float
    ) -> torch.Tensor:
        """Returns weighted sums of latents, as absorbed: (num_heads, batch, kv_rank). Args: units: beginnings of the
        chosen latents, and padding."""
        shape = sums.num_parts, sums.tile_rows, absorbed.shape[-1]
        parts = torch.empty(shape, dtype=torch.float32, device=self._device)
        log_sums = torch.empty(shape[:2], dtype=torch.float32, device=self._device)
        out = torch.empty_like(absorbed)
        attend(
            absorbed,
            q_rope,
            self._units,
            0,
            sums.items,
            sums.merges,
            units[sums.at].int(),
            parts,
            log_sums,
            sums.most_parts,
            scale,
            self._num_programs,
            out,
        )
        return out

    def _plan_sums(self, num_chosen: Sequence[int], stride: int) -> _Sums:
        """Args: num_chosen: of each sequence; stride: from one sequence's choice to the next's."""
        sequences = []
        for count in num_chosen:
            # A decoded sequence with pages of one token each, whose ids are known later.
            sequences.append(TokenSequence([], 0, array("i", bytes(4 * count)), cached_len=count - 1))
            sequences[-1].device_len = count
        plans = decode_plans(len(num_chosen), self._num_heads, self._num_programs)
        plan = plans.build(replace(self._layout.latents, page_size=1), sequences)
        at = np.concatenate([row * stride + np.arange(count) for row, count in enumerate(num_chosen)])
        at_device, items, merges = Packed(at, plan.items, plan.merges).to(self._device)
        return _Sums(at_device, items, merges, max(1, plan.num_parts), plans.tile_rows, plans.most_parts)
