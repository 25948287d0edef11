"""Attention of decode steps with drafts against plain softmax attention, over pages full of NaN."""

from collections.abc import Callable

import pytest
import torch

from tandem.engine.attention.base import GraphableHeadBackend, HeadBackend
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tests.fakes.attention import AttentionOracle
from tests.gpu.engine.attention import test_attention, test_quantization

NUM_PAGES = 500
ONES = KvScales.ones(2)
MAX_ERROR, MAX_QUANTIZED_ERROR = 5e-3, 8e-3

MakeBackend = Callable[[KvPool, int], GraphableHeadBackend]


class FixedRows(HeadBackend):
    """Steps with drafts of a fixed number of rows, as graphs have them."""

    def __init__(self, backend: GraphableHeadBackend, num_rows: int) -> None:
        self._backend = backend
        # Smaller sizes share the memory.
        self._graphed = backend.for_draft_graphs([2, num_rows], NUM_PAGES)[num_rows]
        self._num_rows = num_rows
        self._has_drafts = False

    def plan(self, batch: Batch) -> None:
        self._has_drafts = batch.num_drafts > 0
        if not self._has_drafts:
            self._backend.plan(batch)
            return
        self._graphed.plan(batch.sequences)
        positions = [p for s in batch.sequences for p in range(s.cached_len, s.device_len)]
        assert self._graphed.positions.tolist() == positions + [0] * (self._num_rows - len(positions))

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        if not self._has_drafts:
            return self._backend.attend(qkv, rotation, qk_norm, layer)
        padded = torch.cat((qkv, qkv.new_zeros(self._num_rows - len(qkv), *qkv.shape[1:])))
        rotation = Rotation(rotation.tables, rotation.positions.new_zeros(len(padded)), qkv.dtype)
        return self._graphed.attend(padded, rotation, qk_norm, layer)[: len(qkv)]


def run_drafts(
    make_backend: Callable[[KvPool, int], HeadBackend], layout: KvHeadLayout, num_q_heads: int, scales: KvScales
) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    max_error = MAX_QUANTIZED_ERROR if layout.quantized_to else MAX_ERROR
    pool = CudaKvPool(layout, NUM_PAGES * 16 // layout.page_size, torch.device("cuda", 0))
    oracle = AttentionOracle(pool, num_q_heads, make_backend, scales)
    long, middle, short = oracle.add(3100), oracle.add(400), oracle.add(40)
    oracle.step("prefill", {long: 3000, short: 1}, max_error=max_error)
    oracle.step("prefill", {middle: 317}, max_error=max_error)
    # From 1 to 8 new tokens, beside sequences with others; then more than share a read.
    for num_new in range(1, 8):
        of_each = {middle: num_new, short: 1, long: 9 - num_new}
        oracle.step("decode", of_each, max_error=max_error)
    oracle.step("decode", {long: 2}, max_error=max_error)
    oracle.step("decode", {short: 11, long: 8}, max_error=max_error)
    # Only the new slots were written.
    finite = oracle.kv.float().isfinite().movedim(3, 1).flatten(2).all(2)  # (num_pages, page_size)
    expected = torch.zeros_like(finite)
    for sequence in (long, middle, short):
        for position in range(sequence.cached_len):
            expected[sequence.page_ids[position // layout.page_size], position % layout.page_size] = True
    assert torch.equal(finite, expected)


# Each case compiles kernels for seconds, so sizes are not fully crossed.
@pytest.mark.parametrize("make_backend", [test_attention.flashinfer, test_attention.triton])
@pytest.mark.parametrize("num_rows", [None, 24])
@pytest.mark.parametrize(
    ("page_size", "num_q_heads", "num_kv_heads", "head_dim"),
    [(16, 32, 8, 128), (1, 9, 3, 64), (3, 16, 2, 128), (64, 8, 1, 256), (16, 4, 4, 64), (16, 32, 1, 128)],
)
def test_drafts(
    make_backend: MakeBackend, num_rows: int | None, page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    def make(pool: KvPool, num_heads: int) -> HeadBackend:
        backend = make_backend(pool, num_heads)
        return backend if num_rows is None else FixedRows(backend, num_rows)

    run_drafts(make, KvHeadLayout(2, page_size, num_kv_heads, head_dim, "bfloat16"), num_q_heads, ONES)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64)])
def test_drafts_over_quantized_pages(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    layout = test_quantization.quantized_layout(16, num_kv_heads, head_dim)
    run_drafts(
        lambda pool, heads: FixedRows(test_quantization.triton(pool, heads), 24),
        layout,
        num_q_heads,
        test_quantization.SCALES,
    )
