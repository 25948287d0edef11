"""Attention on a GPU against attention written out, over pages full of NaN."""

from collections.abc import Callable

import pytest
import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool
from tests.fakes.attention import AttentionOracle

NUM_LAYERS = 2
NUM_PAGES = 300
MAX_ERROR = 5e-3


def flashinfer(pool: KvPool, num_q_heads: int) -> AttentionBackend:
    from tandem.engine.attention.flashinfer import FlashInferAttention
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert isinstance(pool, CudaKvPool)
    return FlashInferAttention(pool, num_q_heads)


def reference(pool: KvPool, num_q_heads: int) -> AttentionBackend:
    from tandem.engine.attention.reference import ReferenceAttention

    return ReferenceAttention(pool, num_q_heads)


@pytest.mark.parametrize("make_backend", [flashinfer, reference])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (9, 3), (32, 8), (16, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_then_decode(
    make_backend: Callable[[KvPool, int], AttentionBackend],
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    layout = PageLayout(NUM_LAYERS, page_size, num_kv_heads, head_dim, "bfloat16")
    pool = CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0))
    oracle = AttentionOracle(pool, num_q_heads, make_backend)
    a, b, c = oracle.add(140), oracle.add(63), oracle.add(9)
    oracle.step("prefill", {a: 117, c: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {b: 60, a: 1, c: 5}, max_error=MAX_ERROR)
    oracle.step("prefill", {a: 13}, max_error=MAX_ERROR)
    for _ in range(3):
        oracle.step("decode", {c: 1, a: 1, b: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {a: 1}, max_error=MAX_ERROR)
