"""The reference attention backend against softmax attention written out, over pages full of NaN."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from engine.attention.layout import KvHeadLayout
from engine.attention.reference import ReferenceAttention
from engine.batch import ForwardMode
from engine.kvcache.pool import CpuKvPool
from engine.token_sequence import TokenSequence
from tests.fakes.attention import AttentionOracle

NUM_LAYERS = 2
HEAD_DIM = 16
NUM_PAGES = 160
_names = itertools.count()


class Oracle(AttentionOracle):
    """The reference backend on the CPU; steps are checked as closely as the dtype allows."""

    def __init__(self, page_size: int, num_q_heads: int, num_kv_heads: int, dtype: str) -> None:
        layout = KvHeadLayout(NUM_LAYERS, page_size, num_kv_heads, HEAD_DIM, dtype)
        super().__init__(
            CpuKvPool(layout, NUM_PAGES, f"test-attention-{next(_names)}"), num_q_heads, ReferenceAttention
        )
        self._max_error = 1e-6 if dtype == "float32" else 5e-3

    def check(self, mode: ForwardMode, extend: dict[TokenSequence, int]) -> None:
        self.step(mode, extend, max_error=self._max_error)


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
    oracle = Oracle(page_size, num_q_heads, num_kv_heads, dtype)
    a, b, c = oracle.add(40), oracle.add(23, spare_pages=2), oracle.add(9)
    oracle.check("prefill", {a: 17, c: 1})
    oracle.check("prefill", {b: 20, a: 1, c: 5})
    oracle.check("prefill", {a: 13})
    for _ in range(3):
        oracle.check("decode", {c: 1, a: 1, b: 1})
    oracle.check("decode", {a: 1})


def test_prefix_of_shared_pages(dtype: str) -> None:
    oracle = Oracle(3, 6, 2, dtype)
    a, b = oracle.add(10), oracle.add(14)
    for of_a, of_b in zip(oracle.qkv[id(a)], oracle.qkv[id(b)], strict=True):
        of_b[:, :6] = of_a[:, :6]
    b = TokenSequence(b.token_ids, 14, [*a.page_ids[:2], *b.page_ids[2:]], cached_len=6)
    oracle.qkv[id(b)] = list(oracle.qkv.values())[1]
    oracle.check("prefill", {a: 9})
    before = oracle.kv[list(a.page_ids)].clone()
    oracle.check("prefill", {b: 7})
    torch.testing.assert_close(oracle.kv[list(a.page_ids)], before, atol=0, rtol=0, equal_nan=True)
    oracle.check("decode", {a: 1, b: 1})


def test_writes_exactly_the_new_slots() -> None:
    oracle = Oracle(16, 4, 2, "float32")
    a, b = oracle.add(20), oracle.add(5)
    oracle.check("prefill", {a: 18, b: 2})
    oracle.check("decode", {a: 1, b: 1})
    written = torch.zeros(NUM_PAGES, 16, dtype=torch.bool)
    for s in (a, b):
        for position in range(s.cached_len):
            written[s.page_ids[position // 16], position % 16] = True
    finite = oracle.kv.isfinite().movedim(3, 1)  # (num_pages, page_size, num_layers, 2, heads, head_dim)
    assert torch.equal(finite.flatten(2).all(2), written)
    assert torch.equal(finite.flatten(2).any(2), written)


def test_length_of_many_pages_beside_a_short_one(dtype: str) -> None:
    oracle = Oracle(16, 9, 3, dtype)
    long, short = oracle.add(800), oracle.add(2)
    oracle.check("prefill", {long: 500})
    oracle.check("prefill", {long: 299, short: 1})
    oracle.check("decode", {short: 1, long: 1})
