"""A float64 attention reference, with sequences over a pool full of NaN, to check every backend against."""

import math
import random
from collections.abc import Callable

import torch

from tandem.engine.attention.base import HeadBackend
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.rounding import e4m3_rounded

MAX_POSITIONS = 4096


class AttentionOracle:
    """Sequences with all their queries, keys and values, and a pool whose unused slots are NaN.

    Attributes:
        kv: the pool as keys and values.
    """

    def __init__(
        self,
        pool: KvPool,
        num_q_heads: int,
        make_backend: Callable[[KvPool, int], HeadBackend],
        kv_scales: KvScales | None = None,
    ) -> None:
        """Args: kv_scales: the backend's scales, for quantized pages."""
        layout = pool.layout
        assert isinstance(layout, KvHeadLayout)
        self._layout = layout
        self.kv = layout.view(pool.memory)
        self.kv.fill_(math.nan)
        self._scales = kv_scales or KvScales.ones(layout.num_layers)
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self.attention = make_backend(pool, num_q_heads)
        self._heads = (num_q_heads, layout.num_kv_heads, layout.num_kv_heads)
        self._free = list(range(pool.num_pages))
        random.Random(0).shuffle(self._free)
        self._generator = torch.Generator().manual_seed(0)
        self.qkv: dict[int, list[torch.Tensor]] = {}
        # Rotation by angle 0 at every position.
        self._tables = RotaryEmbedding(layout.head_dim, 1e4, None, MAX_POSITIONS, pool.device)
        self._tables.cos.fill_(1.0)
        self._tables.sin.fill_(0.0)

    def add(self, num_tokens: int, spare_pages: int = 0) -> TokenSequence:
        num_pages = self._layout.num_pages_for(num_tokens) + spare_pages
        pages = [self._free.pop() for _ in range(num_pages)]
        sequence = TokenSequence([0] * num_tokens, num_tokens, pages)
        self.qkv[id(sequence)] = [
            torch.randn(
                self._layout.num_layers, num_tokens, heads, self._layout.head_dim, generator=self._generator
            ).to(self.kv.device, self._dtype)
            for heads in self._heads
        ]
        return sequence

    def step(
        self, mode: ForwardMode, extend: dict[TokenSequence, int], *, max_error: float, num_mixed: int = 0
    ) -> None:
        """Run one forward pass over all layers and check ||out - expected|| / ||expected||.

        Args:
            extend: tokens to compute; those of a decoded sequence after the first are drafts, all accepted.
            num_mixed: as in Batch.
        """
        for number, (sequence, num_tokens) in enumerate(extend.items()):
            if mode == "decode" or number < num_mixed:
                sequence.draft_ids = (0,) * (num_tokens - 1)
            sequence.extend(num_tokens)
        self.attention.plan(Batch(mode, list(extend), num_mixed=num_mixed))
        for layer in range(self._layout.num_layers):
            parts = [
                torch.cat([self.qkv[id(s)][part][layer, s.cached_len : s.device_len] for s in extend])
                for part in range(3)
            ]
            qkv = torch.cat(parts, dim=1)
            positions = torch.cat([torch.arange(s.cached_len, s.device_len, device=qkv.device) for s in extend])
            out = self.attention.attend(qkv, Rotation(self._tables, positions, qkv.dtype), None, layer)
            expected = torch.cat([self._expected(s, layer) for s in extend])
            assert out.shape == expected.shape and out.dtype == qkv.dtype
            # Check prefill and decode rows apart: the few decode rows would not show in a joint norm.
            num_decoded = sum([*extend.values()][:num_mixed])
            for rows in (slice(num_decoded), slice(num_decoded, None)):
                assert (out[rows] - expected[rows]).norm() <= max_error * expected[rows].norm()
        for sequence in extend:
            num_drafts = len(sequence.draft_ids)
            sequence.complete_extend()
            sequence.accept_drafts(num_drafts)

    def _expected(self, s: TokenSequence, layer: int) -> torch.Tensor:
        q, k, v = (tensor[layer, : s.device_len].double() for tensor in self.qkv[id(s)])
        if self._layout.quantized_to:
            k, v = e4m3_rounded(k, self._scales.keys[layer]), e4m3_rounded(v, self._scales.values[layer])
        group = self._heads[0] // self._heads[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self._layout.head_dim)
        future = torch.ones(s.device_len, s.device_len, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)[s.cached_len :].flatten(1).float()
