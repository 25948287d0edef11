"""Plain latent attention against softmax attention over expanded keys and values, over pages full of NaN."""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_reference import LatentReferenceAttention
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import ForwardMode
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.latent_attention import LatentOracle

NUM_LAYERS, NUM_PAGES = 2, 160
# (num_heads, nope_dim, rope_dim, value_dim): values smaller than, as large as and larger than queries.
SHAPES = [(4, 16, 8, 16), (3, 12, 4, 16), (1, 6, 2, 20)]
_names = itertools.count()
# Of latents of about 1; values have none of their own.
SCALES = KvScales((0.01, 0.25), (3.0, 3.0))
# (compute dtype, quantized dtype of latents), and the error that rounding may cause.
DTYPES = {
    ("float32", ""): 1e-5,
    ("bfloat16", ""): 0.015,
    ("float32", "float8_e4m3fn"): 1e-5,
    ("bfloat16", "float8_e4m3fn"): 0.015,
}


class Oracle(LatentOracle):
    """The reference backend on the CPU, with tolerances per dtype."""

    def __init__(self, page_size: int, shape: tuple[int, int, int, int], dtypes: tuple[str, str]) -> None:
        num_heads, nope_dim, rope_dim, value_dim = shape
        layout = LatentLayout(NUM_LAYERS, page_size, 32, rope_dim, *dtypes)
        pool = CpuKvPool(layout, NUM_PAGES, f"test-latents-{next(_names)}")
        if layout.quantized_to:
            backend = partial(LatentReferenceAttention, kv_scales=SCALES)
            super().__init__(pool, backend, num_heads, nope_dim, value_dim, SCALES)
        else:
            super().__init__(pool, LatentReferenceAttention, num_heads, nope_dim, value_dim)
        self._max_error = DTYPES[dtypes]

    def check(self, mode: ForwardMode, extend: dict[TokenSequence, int], num_mixed: int = 0) -> None:
        self.step(mode, extend, max_error=self._max_error, num_mixed=num_mixed)


@pytest.fixture(params=DTYPES, ids=["-to-".join(filter(None, pair)) for pair in DTYPES])
def dtypes(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    yield request.param


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_then_decode(page_size: int, shape: tuple[int, int, int, int], dtypes: tuple[str, str]) -> None:
    oracle = Oracle(page_size, shape, dtypes)
    a, b, c = oracle.add(40), oracle.add(23, spare_pages=2), oracle.add(9)
    oracle.check("prefill", {a: 17, c: 1})
    oracle.check("prefill", {b: 20, a: 1, c: 5})
    oracle.check("prefill", {a: 13})
    for _ in range(3):
        oracle.check("decode", {c: 1, a: 1, b: 1})
    oracle.check("decode", {a: 1})


def test_drafts_are_computed_as_decoded_one_by_one(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(3, SHAPES[0], dtypes)
    a, b, c, d = oracle.add(40), oracle.add(23, spare_pages=2), oracle.add(9), oracle.add(20)
    oracle.check("prefill", {a: 17, b: 1, c: 5})
    oracle.check("decode", {a: 5, b: 1, c: 2})
    oracle.check("mixed", {b: 4, a: 1, d: 7}, num_mixed=2)
    a.cached_len = a.device_len = 20
    oracle.check("decode", {b: 1, a: 3})


def test_chunks_beside_decoded_sequences(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(3, SHAPES[0], dtypes)
    a, b, c, d = oracle.add(30), oracle.add(23, spare_pages=2), oracle.add(9), oracle.add(40)
    oracle.check("prefill", {a: 27, c: 5})
    oracle.check("mixed", {c: 1, b: 20}, num_mixed=1)
    oracle.check("mixed", {a: 1, c: 1, b: 1, d: 17}, num_mixed=2)
    oracle.check("mixed", {b: 1, a: 1, d: 22}, num_mixed=2)
    oracle.check("decode", {c: 1, d: 1, a: 1})


def test_prefix_of_shared_pages(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(3, SHAPES[0], dtypes)
    a, b = oracle.add(10), oracle.add(14)
    for of_a, of_b in zip(oracle.projected[id(a)], oracle.projected[id(b)], strict=True):
        of_b[:, :6] = of_a[:, :6]
    projected = oracle.projected[id(b)]
    b = TokenSequence(b.token_ids, 14, [*a.page_ids[:2], *b.page_ids[2:]], cached_len=6)
    oracle.projected[id(b)] = projected
    oracle.check("prefill", {a: 9})
    before = [numbers[list(a.page_ids)].float() for numbers in oracle.pages]
    oracle.check("prefill", {b: 7})
    for numbers, of_a in zip(oracle.pages, before, strict=True):
        torch.testing.assert_close(numbers[list(a.page_ids)].float(), of_a, atol=0, rtol=0, equal_nan=True)
    oracle.check("decode", {a: 1, b: 1})


def test_writes_exactly_the_new_slots(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(16, SHAPES[0], dtypes)
    a, b = oracle.add(20), oracle.add(5)
    oracle.check("prefill", {a: 18, b: 2})
    oracle.check("decode", {a: 1, b: 1})
    written = torch.zeros(NUM_PAGES, 16, dtype=torch.bool)
    for s in (a, b):
        for position in range(s.cached_len):
            written[s.page_ids[position // 16], position % 16] = True
    for numbers in oracle.pages:
        finite = numbers.float().isfinite().movedim(2, 1).flatten(2)  # (num_pages, page_size, layers and numbers)
        assert torch.equal(finite.all(2), written)
        assert torch.equal(finite.any(2), written)


def test_length_of_many_pages_beside_a_short_one(dtypes: tuple[str, str]) -> None:
    oracle = Oracle(16, SHAPES[0], dtypes)
    long, short = oracle.add(800), oracle.add(2)
    oracle.check("prefill", {long: 500})
    oracle.check("prefill", {long: 299, short: 1})
    oracle.check("decode", {short: 1, long: 1})
