"""A float64 reference of latent attention, with sequences over a pool full of NaN, to check backends against."""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tandem.engine.attention.base import LatentBackend, LatentHeads
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.rounding import e4m3_rounded

MAX_POSITIONS = 4096
NORM_EPS = 1e-6


class Projected(NamedTuple):
    """
    Attributes:
        q: (num_layers, num_tokens, num_heads, nope_dim + rope_dim).
        kv: (num_layers, num_tokens, kv_rank + rope_dim).
    """

    q: torch.Tensor
    kv: torch.Tensor


class LatentOracle:
    """Sequences with all their queries and latents, and a pool whose unused slots are NaN.

    Attributes:
        pages: the pool's numbers.
        heads: of each layer.
    """

    def __init__(
        self,
        pool: KvPool,
        make_backend: Callable[[KvPool, int], LatentBackend],
        num_heads: int,
        nope_dim: int,
        value_dim: int,
        kv_scales: KvScales | None = None,
    ) -> None:
        """Args: kv_scales: the backend's scales, for quantized latents."""
        layout = pool.layout
        assert isinstance(layout, LatentLayout)
        self._layout = layout
        self.pages = layout.views(pool.memory)
        for numbers in self.pages:
            numbers.fill_(math.nan)
        self._scales = kv_scales or KvScales.ones(layout.num_layers)
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self.attention = make_backend(pool, num_heads)
        self._num_heads, self._q_dim = num_heads, nope_dim + layout.rope_dim
        self._free = list(range(pool.num_pages))
        random.Random(0).shuffle(self._free)
        self._generator = torch.Generator().manual_seed(0)
        self.projected: dict[int, Projected] = {}
        self._tables = RotaryEmbedding(layout.rope_dim, 1e4, None, MAX_POSITIONS, pool.device)
        scale = layout.kv_rank**-0.5
        self.heads = [
            LatentHeads(
                self._random(num_heads, nope_dim, layout.kv_rank) * scale,
                self._random(num_heads, value_dim, layout.kv_rank) * scale,
                0.7 * self._q_dim**-0.5,
            )
            for _ in range(layout.num_layers)
        ]
        self._norm = Norm(1 + 0.2 * self._random(layout.kv_rank), NORM_EPS)

    def add(self, num_tokens: int, spare_pages: int = 0) -> TokenSequence:
        num_pages = self._layout.num_pages_for(num_tokens) + spare_pages
        sequence = TokenSequence([0] * num_tokens, num_tokens, [self._free.pop() for _ in range(num_pages)])
        num_layers = self._layout.num_layers
        self.projected[id(sequence)] = Projected(
            self._random(num_layers, num_tokens, self._num_heads, self._q_dim),
            self._random(num_layers, num_tokens, self._layout.token_dim),
        )
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
        for layer in range(len(self.heads)):
            out = self.attend(list(extend), layer)
            expected = torch.cat([self._expected(s, layer) for s in extend])
            assert out.shape == expected.shape and out.dtype == self._dtype
            # Check prefill and decode rows apart: the few decode rows would not show in a joint norm.
            num_decoded = sum([*extend.values()][:num_mixed])
            for rows in (slice(num_decoded), slice(num_decoded, None)):
                assert (out[rows] - expected[rows]).norm() <= max_error * expected[rows].norm()
        for sequence in extend:
            num_drafts = len(sequence.draft_ids)
            sequence.complete_extend()
            sequence.accept_drafts(num_drafts)

    def attend(self, sequences: Sequence[TokenSequence], layer: int) -> torch.Tensor:
        """Run one layer for the sequences' new tokens, which are planned."""
        new = [(self.projected[id(s)], slice(s.cached_len, s.device_len)) for s in sequences]
        q = torch.cat([projected.q[layer, tokens] for projected, tokens in new])
        kv = torch.cat([projected.kv[layer, tokens] for projected, tokens in new])
        positions = torch.cat([torch.arange(s.cached_len, s.device_len, device=q.device) for s in sequences])
        rotation = Rotation(self._tables, positions, q.dtype)
        return self.attention.attend(q, kv, self._norm, rotation, self.heads[layer], layer)

    def _expected(self, s: TokenSequence, layer: int) -> torch.Tensor:
        q, kv = (tensor[layer, : s.device_len].double() for tensor in self.projected[id(s)])
        rank, nope_dim = self._layout.kv_rank, self._q_dim - self._layout.rope_dim
        latents = kv[:, :rank]
        latents = latents / (latents.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * self._norm.weight.double()
        if self._layout.quantized_to:
            latents = e4m3_rounded(latents, self._scales.keys[layer])
        heads = self.heads[layer]
        keys = torch.einsum("kr,hnr->khn", latents, heads.keys.double())
        values = torch.einsum("kr,hvr->khv", latents, heads.values.double())
        new = slice(s.cached_len, None)
        scores = torch.einsum("qhn,khn->hqk", q[new, :, :nope_dim], keys)
        q_turned, k_turned = self._turned(q[..., nope_dim:])[new], self._turned(kv[:, None, rank:])
        scores = scores + (q_turned @ k_turned.conj()[:, 0].T).real.movedim(1, 0)
        future = torch.ones(s.extend_len, s.device_len, dtype=torch.bool, device=q.device).triu(1 + s.cached_len)
        weights = (scores * heads.scale).masked_fill(future, -math.inf).softmax(dim=-1)
        return torch.einsum("hqk,khv->qhv", weights, values).flatten(1).float()

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Turn pairs of neighbors, as complex numbers, by position: (num_tokens, num_heads, rope_dim / 2)."""
        frequencies = 1e4 ** (-torch.arange(0, x.shape[-1], 2, device=x.device).double() / x.shape[-1])
        angles = torch.arange(len(x), device=x.device).double()[:, None, None] * frequencies
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return pairs * torch.polar(torch.ones_like(angles), angles)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.pages.keys.device, self._dtype)
