"""Kernels over chosen latents against plain torch, over pages full of NaN."""

import math
import random

import pytest
import torch

from tandem.engine.attention.base import Index, IndexedBackend, LatentHeads
from tandem.engine.attention.indexed_layout import IndexedLayout
from tandem.engine.attention.indexed_reference import IndexedReferenceAttention
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.token_sequence import TokenSequence

RANK, ROPE, NOPE, VALUE, INDEX_HEADS, INDEX_DIM, LAYERS, NUM_PAGES = 512, 64, 128, 128, 8, 128, 2, 3000
MAX_ERROR = 0.02


class Run:
    """Two sequences through a backend, with the same random numbers each time."""

    def __init__(self, backend: type[IndexedBackend], page_size: int, num_heads: int, top_k: int) -> None:
        from tandem.engine.kvcache.cuda_pool import CudaKvPool

        self._device = torch.device("cuda", 0)
        layout = IndexedLayout(LAYERS, page_size, RANK, ROPE, INDEX_DIM, "bfloat16")
        pool = CudaKvPool(layout, NUM_PAGES // page_size + 4, self._device)
        pool.memory.view(torch.bfloat16).fill_(math.nan)
        self._attention = backend(pool, num_heads)
        self._num_heads, self._top_k = num_heads, top_k
        self._random = torch.Generator().manual_seed(0)
        pages = random.Random(0).sample(range(pool.num_pages), pool.num_pages)
        self.sequences = [
            TokenSequence([0] * length, length, [pages.pop() for _ in range(layout.num_pages_for(length))])
            for length in (900, 70)
        ]
        self._tables = RotaryEmbedding(ROPE, 1e4, None, 1024, self._device)
        self._heads = [
            LatentHeads(self._normal(num_heads, NOPE, RANK) / 20, self._normal(num_heads, VALUE, RANK) / 20, 0.05)
            for _ in range(LAYERS)
        ]
        self._norm = Norm(1 + self._normal(RANK) / 5, 1e-6)

    def step(self, mode: ForwardMode, counts: tuple[int, ...], num_mixed: int = 0) -> torch.Tensor:
        """Returns the last layer's output."""
        for s, count in zip(self.sequences, counts, strict=True):
            s.extend(count)
        self._attention.plan(Batch(mode, self.sequences, num_mixed=num_mixed))
        positions = torch.cat([torch.arange(s.cached_len, s.device_len, device=self._device) for s in self.sequences])
        total = len(positions)
        for layer in range(LAYERS):
            q = self._normal(total, self._num_heads, NOPE + ROPE)
            kv = self._normal(total, RANK + ROPE)
            weights = self._normal(total, INDEX_HEADS).float()
            index = Index(
                self._normal(total, INDEX_HEADS, INDEX_DIM), self._normal(total, INDEX_DIM), weights, self._top_k
            )
            rotation = Rotation(self._tables, positions, torch.bfloat16)
            out = self._attention.attend(q, kv, self._norm, rotation, self._heads[layer], index, layer)
        for s in self.sequences:
            s.complete_extend()
        return out.float()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(self._device, torch.bfloat16)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "top_k"), [(16, 256), (128, 200), (16, 2048)])
def test_decodes_as_plain_torch(page_size: int, num_heads: int, top_k: int) -> None:
    from tandem.engine.attention.indexed_triton import IndexedTritonAttention

    ours, plain = (Run(b, page_size, num_heads, top_k) for b in (IndexedTritonAttention, IndexedReferenceAttention))
    steps: list[tuple[ForwardMode, tuple[int, ...], int]] = [
        ("prefill", (850, 40), 0),
        ("decode", (1, 1), 0),
        ("mixed", (1, 20), 1),
        ("decode", (1, 1), 0),
    ]
    for mode, counts, num_mixed in steps:
        actual, expected = (run.step(mode, counts, num_mixed) for run in (ours, plain))
        assert actual.isfinite().all()
        for rows in (slice(counts[0]), slice(counts[0], None)):
            assert (actual[rows] - expected[rows]).norm() <= MAX_ERROR * expected[rows].norm()
