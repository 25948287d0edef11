"""GPU attention backends against plain softmax attention, over pages full of NaN."""

from collections.abc import Callable

import pytest
import torch

from tandem.engine.attention.base import Attention, GraphableHeadBackend, HeadAttention, HeadBackend
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.attention import AttentionOracle

NUM_LAYERS = 2
NUM_PAGES = 300
MAX_ERROR = 5e-3


def flashinfer(pool: KvPool, num_q_heads: int) -> GraphableHeadBackend:
    from tandem.engine.attention.flashinfer import FlashInferAttention
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert isinstance(pool, CudaKvPool)
    return FlashInferAttention(pool, num_q_heads)


def triton(pool: KvPool, num_q_heads: int) -> GraphableHeadBackend:
    from tandem.engine.attention.triton import TritonAttention
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert isinstance(pool, CudaKvPool)
    return TritonAttention(pool, num_q_heads)


def reference(pool: KvPool, num_q_heads: int) -> HeadBackend:
    from tandem.engine.attention.reference import ReferenceAttention

    return ReferenceAttention(pool, num_q_heads)


def run_chunks_then_decode(
    make_backend: Callable[[KvPool, int], HeadBackend],
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    layout = KvHeadLayout(NUM_LAYERS, page_size, num_kv_heads, head_dim, "bfloat16")
    pool = CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0))
    oracle = AttentionOracle(pool, num_q_heads, make_backend)
    a, b, c = oracle.add(140), oracle.add(63), oracle.add(9)
    oracle.step("prefill", {a: 117, c: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {b: 60, a: 1, c: 5}, max_error=MAX_ERROR)
    oracle.step("prefill", {a: 13}, max_error=MAX_ERROR)
    for _ in range(3):
        oracle.step("decode", {c: 1, a: 1, b: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {a: 1}, max_error=MAX_ERROR)
    if not oracle.attention.computes_mixed:
        return
    # New and continued prompts, beside one and several decoding sequences.
    d, e = oracle.add(60), oracle.add(27)
    oracle.step("mixed", {a: 1, d: 40}, max_error=MAX_ERROR, num_mixed=1)
    oracle.step("mixed", {d: 1, a: 1, e: 17}, max_error=MAX_ERROR, num_mixed=2)
    oracle.step("mixed", {a: 1, e: 10, d: 18}, max_error=MAX_ERROR, num_mixed=1)


@pytest.mark.parametrize("make_backend", [flashinfer, reference])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (9, 3), (32, 8), (16, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_then_decode(
    make_backend: Callable[[KvPool, int], HeadBackend],
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    run_chunks_then_decode(make_backend, page_size, num_q_heads, num_kv_heads, head_dim)


# Each case compiles kernels for seconds, so sizes are not fully crossed.
@pytest.mark.parametrize(
    ("page_size", "num_q_heads", "num_kv_heads", "head_dim"),
    [
        (1, 4, 4, 64),
        (1, 32, 8, 128),
        (3, 9, 3, 64),
        (3, 16, 2, 128),
        (16, 4, 2, 64),
        (16, 9, 3, 128),
        (16, 32, 8, 128),
        (16, 8, 1, 256),
        (64, 4, 4, 128),
        (64, 16, 2, 64),
    ],
)
def test_chunks_then_decode_by_triton(page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    run_chunks_then_decode(triton, page_size, num_q_heads, num_kv_heads, head_dim)


class FixedSizeDecode(HeadBackend):
    """Decode with fixed tensors and padding, as graphs do."""

    def __init__(self, backend: GraphableHeadBackend, batch_size: int) -> None:
        self._backend = backend
        self._graphed = backend.for_graphs([batch_size, 1], NUM_PAGES)[batch_size]
        self._batch_size = batch_size
        self._is_decode = False

    def plan(self, batch: Batch) -> None:
        self._is_decode = batch.mode == "decode"
        if not self._is_decode:
            self._backend.plan(batch)
            return
        self._graphed.plan(batch.sequences)
        num_padding = self._batch_size - len(batch.sequences)
        assert self._graphed.positions.tolist() == [s.cached_len for s in batch.sequences] + [0] * num_padding

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        if not self._is_decode:
            return self._backend.attend(qkv, rotation, qk_norm, layer)
        padded = torch.cat((qkv, qkv.new_zeros(self._batch_size - len(qkv), *qkv.shape[1:])))
        rotation = Rotation(rotation.tables, rotation.positions.new_zeros(len(padded)), qkv.dtype)
        return self._graphed.attend(padded, rotation, qk_norm, layer)[: len(qkv)]


@pytest.mark.parametrize("make_backend", [flashinfer, triton])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(9, 3), (8, 1)])
@pytest.mark.parametrize("batch_size", [3, 8])
def test_decode_of_a_fixed_size_over_long_and_short_sequences(
    make_backend: Callable[[KvPool, int], GraphableHeadBackend], num_q_heads: int, num_kv_heads: int, batch_size: int
) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    layout = KvHeadLayout(NUM_LAYERS, 16, num_kv_heads, 128, "bfloat16")
    pool = CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0))
    oracle = AttentionOracle(
        pool, num_q_heads, lambda pool, heads: FixedSizeDecode(make_backend(pool, heads), batch_size)
    )
    long, middle, short = oracle.add(3000), oracle.add(515), oracle.add(4)
    oracle.step("prefill", {long: 2000, short: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {middle: 510, long: 990}, max_error=MAX_ERROR)
    for _ in range(3):
        oracle.step("decode", {middle: 1, short: 1, long: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 1}, max_error=MAX_ERROR)


def test_mixed_forwards_beyond_the_decode_kernel_limit() -> None:
    """FlashInfer's decode and prefill kernels share a workspace."""
    from tandem.engine.attention.flashinfer import MAX_OWN_DECODE
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    layout = KvHeadLayout(NUM_LAYERS, 16, 8, 128, "bfloat16")
    pool = CudaKvPool(layout, NUM_PAGES + MAX_OWN_DECODE, torch.device("cuda", 0))
    oracle = AttentionOracle(pool, 32, flashinfer)
    decoded = [oracle.add(2 + n % 13) for n in range(MAX_OWN_DECODE + 5)]
    long, new = oracle.add(1000), oracle.add(300)
    oracle.step("prefill", {**{s: len(s.token_ids) - 1 for s in decoded}, long: 400}, max_error=MAX_ERROR)
    steps = dict.fromkeys(decoded, 1)
    oracle.step("mixed", {**steps, long: 600, new: 300}, max_error=MAX_ERROR, num_mixed=len(decoded))


class FixedSizePrefill(HeadBackend):
    """Prefill with fixed tensors and padding, as graphs do. Args: has_new: new prompts alone read no pages."""

    def __init__(self, backend: GraphableHeadBackend, size: int, max_sequences: int, *, has_new: bool = False) -> None:
        self._reading = backend.for_prefill_graphs([16, size], max_sequences, NUM_PAGES)[size]
        self._new = backend.for_new_prompt_graphs([16, size], max_sequences)[size] if has_new else self._reading
        self._size = size

    def plan(self, batch: Batch) -> None:
        self._graphed = self._reading if any(s.cached_len for s in batch.sequences) else self._new
        self._graphed.plan(batch.sequences)
        positions = [p for s in batch.sequences for p in range(s.cached_len, s.device_len)]
        assert self._graphed.positions.tolist() == positions + [0] * (self._size - batch.num_tokens)

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        padded = torch.cat((qkv, qkv.new_zeros(self._size - len(qkv), *qkv.shape[1:])))
        positions = torch.cat((rotation.positions, rotation.positions.new_zeros(self._size - len(qkv))))
        rotation = Rotation(rotation.tables, positions, qkv.dtype)
        return self._graphed.attend(padded, rotation, qk_norm, layer)[: len(qkv)]


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(9, 3), (32, 8), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("has_new", [False, True])
def test_prefill_of_a_fixed_size_over_long_and_short_sequences(
    num_q_heads: int, num_kv_heads: int, head_dim: int, has_new: bool
) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    layout = KvHeadLayout(NUM_LAYERS, 16, num_kv_heads, head_dim, "bfloat16")
    pool = CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0))
    if has_new and not flashinfer(pool, num_q_heads).graphs_new_prompts:
        pytest.skip("this GPU has no such graphs")
    oracle = AttentionOracle(
        pool, num_q_heads, lambda pool, heads: FixedSizePrefill(flashinfer(pool, heads), 512, 4, has_new=has_new)
    )
    long, middle, short, one = oracle.add(2000), oracle.add(515), oracle.add(4), oracle.add(1)
    oracle.step("prefill", {oracle.add(200): 200, oracle.add(130): 130, oracle.add(3): 3}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 512}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 300, short: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {short: 1, long: 1, one: 1, middle: 509}, max_error=MAX_ERROR)
    oracle.step("prefill", {middle: 5}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 511}, max_error=MAX_ERROR)


# FlashInfer's kernel for Hopper reads the longer prefix in parts, on a stream of their own.
@pytest.mark.parametrize("prefix_len", [950, 16_000])
def test_kinds_side_by_side_in_a_graph_have_the_bits_of_one_after_the_other(prefix_len: int) -> None:
    from tandem.engine.attention.mixed import graphed_by_kind
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    device = torch.device("cuda", 0)
    layout = KvHeadLayout(NUM_LAYERS, 16, 8, 128, "bfloat16")
    num_tokens = prefix_len + 50
    num_pages = NUM_PAGES + layout.num_pages_for(num_tokens)
    pool = CudaKvPool(layout, num_pages, device)
    layout.view(pool.memory_and_dummy).normal_()
    backend = flashinfer(pool, 32)
    decoded = [TokenSequence([0] * n, n, list(range(first, first + 80)), n - 1) for n, first in ((5, 0), (1200, 80))]
    prompt = TokenSequence([0] * num_tokens, num_tokens, list(range(160, num_pages)), prefix_len)
    for sequence in (*decoded, prompt):
        sequence.extend(sequence.remaining_len)
    decode = backend.for_graphs([2], num_pages)[2]
    prefill = backend.for_prefill_graphs([50], 2, num_pages)[50]
    decode.plan(decoded)
    prefill.plan([prompt])
    qkv = torch.randn(52, 48, 128, device=device).bfloat16()
    rotation = Rotation(RotaryEmbedding(128, 1e4, None, num_tokens + 1000, device), prefill.positions, qkv.dtype)

    def run(attention: Attention) -> torch.Tensor:
        assert isinstance(attention, HeadAttention)
        return torch.stack([attention.attend(qkv.clone(), rotation, None, layer) for layer in range(NUM_LAYERS)])

    expected = run(graphed_by_kind(decode, prefill, 32 * 128))
    together = backend.joined(decode, prefill)
    # Captured with padding alone.
    decode.plan(())
    prefill.plan(())
    run(together)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(together)
    decode.plan(decoded)
    prefill.plan([prompt])
    for _ in range(20):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert found.equal(expected)
    assert expected.isfinite().all() and expected.any(dim=-1).all()
