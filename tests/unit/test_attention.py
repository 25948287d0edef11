"""The reference attention backend against softmax attention written out, over pages full of NaN."""

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch

from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch, Phase
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.request import Sequence

NUM_LAYERS = 2
HEAD_DIM = 16
NUM_PAGES = 160
_names = itertools.count()


class Cluster:
    """Sequences with their whole queries, keys and values, and a pool whose unused slots are all NaN."""

    def __init__(self, page_size: int, num_q_heads: int, num_kv_heads: int, dtype: str) -> None:
        layout = PageLayout(NUM_LAYERS, page_size, num_kv_heads, HEAD_DIM, dtype)
        self.pool = CpuKvPool(layout, NUM_PAGES, f"test-attention-{next(_names)}")
        self.pool.kv.fill_(math.nan)
        self.attention = ReferenceAttention(self.pool, num_q_heads)
        self.heads = (num_q_heads, num_kv_heads, num_kv_heads)
        self._free = list(range(NUM_PAGES))
        random.Random(0).shuffle(self._free)
        self._generator = torch.Generator().manual_seed(0)
        self.qkv: dict[int, list[torch.Tensor]] = {}

    def add(self, num_tokens: int, spare_pages: int = 0) -> Sequence:
        num_pages = self.pool.layout.num_pages_for(num_tokens) + spare_pages
        pages = [self._free.pop() for _ in range(num_pages)]
        sequence = Sequence([0] * num_tokens, num_tokens, pages)
        self.qkv[id(sequence)] = [
            torch.randn(NUM_LAYERS, num_tokens, heads, HEAD_DIM, generator=self._generator).to(self.pool.kv.dtype)
            for heads in self.heads
        ]
        return sequence

    def step(self, phase: Phase, extend: dict[Sequence, int]) -> None:
        """Runs one forward of all layers and checks its output."""
        for sequence, num_tokens in extend.items():
            sequence.extend(num_tokens)
        self.attention.plan(Batch(phase, list(extend)))
        for layer in range(NUM_LAYERS):
            q, k, v = (
                torch.cat([self.qkv[id(s)][part][layer, s.cached_len : s.device_len] for s in extend])
                for part in range(3)
            )
            out = self.attention.run(q, k, v, layer)
            assert out.shape == (len(q), self.heads[0] * HEAD_DIM) and out.dtype == q.dtype
            expected = torch.cat([self._expected(s, layer) for s in extend])
            tolerance = 2e-6 if q.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
        for sequence in extend:
            sequence.complete_extend()

    def _expected(self, s: Sequence, layer: int) -> torch.Tensor:
        q, k, v = (tensor[layer, : s.device_len].double() for tensor in self.qkv[id(s)])
        group = self.heads[0] // self.heads[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
        future = torch.ones(s.device_len, s.device_len, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)[s.cached_len :].flatten(1).float()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait long for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (4, 2), (9, 3)])
def test_chunks_then_decode(page_size: int, num_q_heads: int, num_kv_heads: int, dtype: str) -> None:
    cluster = Cluster(page_size, num_q_heads, num_kv_heads, dtype)
    a, b, c = cluster.add(40), cluster.add(23, spare_pages=2), cluster.add(9)
    cluster.step("prefill", {a: 17, c: 1})
    cluster.step("prefill", {b: 20, a: 1, c: 5})
    cluster.step("prefill", {a: 13})
    for _ in range(3):
        cluster.step("decode", {c: 1, a: 1, b: 1})
    cluster.step("decode", {a: 1})


def test_prefix_of_shared_pages(dtype: str) -> None:
    cluster = Cluster(3, 6, 2, dtype)
    a, b = cluster.add(10), cluster.add(14)
    for of_a, of_b in zip(cluster.qkv[id(a)], cluster.qkv[id(b)], strict=True):
        of_b[:, :6] = of_a[:, :6]
    b = Sequence(b.token_ids, 14, [*a.page_ids[:2], *b.page_ids[2:]], cached_len=6)
    cluster.qkv[id(b)] = list(cluster.qkv.values())[1]
    cluster.step("prefill", {a: 9})
    before = cluster.pool.kv[list(a.page_ids)].clone()
    cluster.step("prefill", {b: 7})
    torch.testing.assert_close(cluster.pool.kv[list(a.page_ids)], before, atol=0, rtol=0, equal_nan=True)
    cluster.step("decode", {a: 1, b: 1})


def test_writes_exactly_the_new_slots() -> None:
    cluster = Cluster(16, 4, 2, "float32")
    a, b = cluster.add(20), cluster.add(5)
    cluster.step("prefill", {a: 18, b: 2})
    cluster.step("decode", {a: 1, b: 1})
    written = torch.zeros(NUM_PAGES, 16, dtype=torch.bool)
    for s in (a, b):
        for position in range(s.cached_len):
            written[s.page_ids[position // 16], position % 16] = True
    finite = cluster.pool.kv.isfinite().movedim(3, 1)  # (num_pages, page_size, num_layers, 2, heads, head_dim)
    assert torch.equal(finite.flatten(2).all(2), written)
    assert torch.equal(finite.flatten(2).any(2), written)


def test_length_of_many_pages_beside_a_short_one(dtype: str) -> None:
    cluster = Cluster(16, 9, 3, dtype)
    long, short = cluster.add(800), cluster.add(2)
    cluster.step("prefill", {long: 500})
    cluster.step("prefill", {long: 299, short: 1})
    cluster.step("decode", {short: 1, long: 1})
