"""FlashInfer's kernels against softmax attention written out, over pages full of NaN."""

import math
import random

import pytest
import torch

from tandem.engine.batch import Batch, Phase
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.request import Sequence

NUM_LAYERS = 2
NUM_PAGES = 300


class Pages:
    """Sequences with their whole queries, keys and values on the device, and a pool whose unused slots are all NaN."""

    def __init__(self, page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
        from tandem.engine.attention.flashinfer import FlashInferAttention
        from tandem.engine.kvcache.cuda_pool import CudaKvPool

        layout = PageLayout(NUM_LAYERS, page_size, num_kv_heads, head_dim, "bfloat16")
        self.pool = CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0))
        self.pool.kv.fill_(math.nan)
        self.attention = FlashInferAttention(self.pool, num_q_heads)
        self._heads = num_q_heads, num_kv_heads, num_kv_heads
        self._head_dim = head_dim
        self._free = list(range(NUM_PAGES))
        random.Random(0).shuffle(self._free)
        self._qkv: dict[int, list[torch.Tensor]] = {}

    def add(self, num_tokens: int) -> Sequence:
        pages = [self._free.pop() for _ in range(self.pool.layout.num_pages_for(num_tokens))]
        sequence = Sequence([0] * num_tokens, num_tokens, pages)
        self._qkv[id(sequence)] = [
            torch.randn(NUM_LAYERS, num_tokens, heads, self._head_dim, device="cuda").bfloat16()
            for heads in self._heads
        ]
        return sequence

    def step(self, phase: Phase, extend: dict[Sequence, int]) -> None:
        """Runs one forward of all layers and checks its output."""
        for sequence, num_tokens in extend.items():
            sequence.extend(num_tokens)
        self.attention.plan(Batch(phase, list(extend)))
        for layer in range(NUM_LAYERS):
            q, k, v = (
                torch.cat([self._qkv[id(s)][part][layer, s.cached_len : s.device_len] for s in extend])
                for part in range(3)
            )
            out = self.attention.run(q, k, v, layer)
            expected = torch.cat([self._expected(s, layer) for s in extend])
            assert out.shape == expected.shape and out.dtype == torch.bfloat16
            assert (out - expected).norm() / expected.norm() < 5e-3
        for sequence in extend:
            sequence.complete_extend()

    def _expected(self, s: Sequence, layer: int) -> torch.Tensor:
        q, k, v = (tensor[layer, : s.device_len].double() for tensor in self._qkv[id(s)])
        group = self._heads[0] // self._heads[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self._head_dim)
        future = torch.ones(s.device_len, s.device_len, dtype=torch.bool, device="cuda").triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)[s.cached_len :].flatten(1).float()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (9, 3), (32, 8), (16, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_then_decode(page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    pages = Pages(page_size, num_q_heads, num_kv_heads, head_dim)
    a, b, c = pages.add(140), pages.add(63), pages.add(9)
    pages.step("prefill", {a: 117, c: 1})
    pages.step("prefill", {b: 60, a: 1, c: 5})
    pages.step("prefill", {a: 13})
    for _ in range(3):
        pages.step("decode", {c: 1, a: 1, b: 1})
    pages.step("decode", {a: 1})
