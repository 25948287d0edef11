"""The reference attention backend against plain softmax attention, over pages full of NaN."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import ForwardMode
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.attention import AttentionOracle

NUM_LAYERS = 2
HEAD_DIM = 16
NUM_PAGES = 160
_names = itertools.count()
# Page scales per layer, for queries, keys and values of about 1.
SCALES = KvScales((0.01, 0.25), (0.3, 1.0))
# (compute dtype, quantized page dtype).
DTYPES = [("float32", ""), ("bfloat16", ""), ("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")]


class Oracle(AttentionOracle):
    """The reference backend on the CPU, with tolerances per dtype."""

    def __init__(self, page_size: int, num_q_heads: int, num_kv_heads: int, dtypes: tuple[str, str]) -> None:
        layout = KvHeadLayout(NUM_LAYERS, page_size, num_kv_heads, HEAD_DIM, *dtypes)
        pool = CpuKvPool(layout, NUM_PAGES, f"test-attention-{next(_names)}")
        if layout.quantized_to:
            super().__init__(pool, num_q_heads, partial(ReferenceAttention, kv_scales=SCALES), SCALES)
        else:
            super().__init__(pool, num_q_heads, ReferenceAttention)
        self._max_error = 1e-6 if layout.dtype == "float32" else 5e-3

    def check(self, mode: ForwardMode, extend: dict[TokenSequence, int], num_mixed: int = 0) -> None:
        self.step(mode, extend, max_error=self._max_error, num_mixed=num_mixed)


@pytest.fixture(params=DTYPES, ids=["-to-".join(filter(None, pair)) for pair in DTYPES])
def dtypes(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    yield request.param


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (4, 2), (9, 3)])
def test_chunks_then_decode(page_size: int, num_q_heads: int, num_kv_heads: int, dtypes: tuple[str, str]) -> None:
    oracle = Oracle(page_size, num_q_heads, num_kv_heads, dtypes)
    a, b, c = oracle.add(40), oracle.add(23, spare_pages=2), oracle.add(9)
    oracle.check("prefill", {a: 17, c: 1})
    oracle.check("prefill", {b: 20, a: 1, c: 5})
    oracle.check("prefill", {a: 13})
    for _ in range(3):
        oracle.check("decode", {c: 1, a: 1, b: 1})
    oracle.check("decode", {a: 1})


def test_drafts_are_computed_as_decoded_one_by_one(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(3, 6, 2, dtypes)
    a, b, c, d = oracle.add(40), oracle.add(23, spare_pages=2), oracle.add(9), oracle.add(20)
    oracle.check("prefill", {a: 17, b: 1, c: 5})
    oracle.check("decode", {a: 5, b: 1, c: 2})
    oracle.check("mixed", {b: 4, a: 1, d: 7}, num_mixed=2)
    oracle.check("decode", {a: 8})
    # Rejected drafts leave slots behind that nobody reads.
    a.cached_len = a.device_len = 20
    oracle.check("decode", {b: 1, a: 3})


def test_chunks_beside_decoded_sequences(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(3, 4, 2, dtypes)
    a, b, c, d = oracle.add(30), oracle.add(23, spare_pages=2), oracle.add(9), oracle.add(40)
    oracle.check("prefill", {a: 27, c: 5})
    oracle.check("mixed", {c: 1, b: 20}, num_mixed=1)
    oracle.check("mixed", {a: 1, c: 1, b: 1, d: 17}, num_mixed=2)
    oracle.check("mixed", {b: 1, a: 1, d: 22}, num_mixed=2)
    oracle.check("decode", {c: 1, d: 1, a: 1})


def test_prefix_of_shared_pages(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(3, 6, 2, dtypes)
    a, b = oracle.add(10), oracle.add(14)
    for of_a, of_b in zip(oracle.qkv[id(a)], oracle.qkv[id(b)], strict=True):
        of_b[:, :6] = of_a[:, :6]
    b = TokenSequence(b.token_ids, 14, [*a.page_ids[:2], *b.page_ids[2:]], cached_len=6)
    oracle.qkv[id(b)] = list(oracle.qkv.values())[1]
    oracle.check("prefill", {a: 9})
    before = oracle.kv[list(a.page_ids)].float()
    oracle.check("prefill", {b: 7})
    torch.testing.assert_close(oracle.kv[list(a.page_ids)].float(), before, atol=0, rtol=0, equal_nan=True)
    oracle.check("decode", {a: 1, b: 1})


def test_writes_exactly_the_new_slots(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(16, 4, 2, dtypes)
    a, b = oracle.add(20), oracle.add(5)
    oracle.check("prefill", {a: 18, b: 2})
    oracle.check("decode", {a: 1, b: 1})
    written = torch.zeros(NUM_PAGES, 16, dtype=torch.bool)
    for s in (a, b):
        for position in range(s.cached_len):
            written[s.page_ids[position // 16], position % 16] = True
    finite = oracle.kv.float().isfinite().movedim(3, 1)  # (num_pages, page_size, num_layers, 2, heads, head_dim)
    assert torch.equal(finite.flatten(2).all(2), written)
    assert torch.equal(finite.flatten(2).any(2), written)


def test_length_of_many_pages_beside_a_short_one(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(16, 9, 3, dtypes)
    long, short = oracle.add(800), oracle.add(2)
    oracle.check("prefill", {long: 500})
    oracle.check("prefill", {long: 299, short: 1})
    oracle.check("decode", {short: 1, long: 1})


def test_quantized_pages_do_not_depend_on_chunking() -> None:
    def outputs(cuts: list[int]) -> torch.Tensor:
        oracle = Oracle(16, 4, 2, ("float32", "float8_e4m3fn"))
        sequence = oracle.add(60)
        seen = []
        attend = oracle.attention.attend

        def kept(*args: Any, **options: Any) -> torch.Tensor:
            seen.append(attend(*args, **options))
            return seen[-1]

        oracle.attention.attend = kept  # type: ignore[method-assign]
        for num_tokens in cuts:
            oracle.check("prefill" if num_tokens > 1 else "decode", {sequence: num_tokens})
        return torch.cat(seen[::NUM_LAYERS])

    torch.testing.assert_close(outputs([17, 30, 12, 1]), outputs([59, 1]))
