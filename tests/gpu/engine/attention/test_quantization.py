"""Quantized pages on a GPU: kernels write the same bytes as plain torch, and attend to them."""

import functools
import math
import random
from collections.abc import Callable

import pytest
import torch

from tandem.engine.attention.base import GraphableHeadBackend, GraphedHeadAttention, HeadBackend
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.quantization import Quantizer
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.graph_capture import GraphCapture
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation, rotate
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.attention import AttentionOracle
from tests.gpu.engine.attention.test_attention import FixedSizePrefill
from tests.gpu.engine.test_sampler import no_waiting

# Scales per layer, for queries, keys and values of about 1.
SCALES = KvScales((0.01, 0.25), (0.3, 1.0))
NUM_PAGES = 300
# Error relative to the rounded numbers; rounding to 8 bits itself is off by 0.026.
MAX_ERROR = 8e-3
GROUPS = [(4, 4), (9, 3), (32, 8), (16, 2), (8, 1)]

MakeBackend = Callable[[KvPool, int], HeadBackend]


def flashinfer(pool: KvPool, num_q_heads: int) -> GraphableHeadBackend:
    from tandem.engine.attention.flashinfer import FlashInferAttention
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert isinstance(pool, CudaKvPool)
    return FlashInferAttention(pool, num_q_heads, SCALES)


def triton(pool: KvPool, num_q_heads: int) -> GraphableHeadBackend:
    from tandem.engine.attention.triton import TritonAttention
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert isinstance(pool, CudaKvPool)
    return TritonAttention(pool, num_q_heads, SCALES)


def reference(pool: KvPool, num_q_heads: int) -> HeadBackend:
    from tandem.engine.attention.reference import ReferenceAttention

    return ReferenceAttention(pool, num_q_heads, SCALES)


def quantized_layout(page_size: int, num_kv_heads: int, head_dim: int, num_layers: int = 2) -> KvHeadLayout:
    return KvHeadLayout(num_layers, page_size, num_kv_heads, head_dim, "bfloat16", "float8_e4m3fn")


def oracle_over(layout: KvHeadLayout, num_pages: int, num_q_heads: int, make_backend: MakeBackend) -> AttentionOracle:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    pool = CudaKvPool(layout, num_pages, torch.device("cuda", 0))
    return AttentionOracle(pool, num_q_heads, make_backend, SCALES)


@pytest.mark.parametrize("make_backend", [flashinfer, triton, reference])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), GROUPS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_then_decode(make_backend: MakeBackend, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    run_chunks_then_decode(make_backend, 16, num_q_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize("make_backend", [flashinfer, triton, reference])
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_pages_of_other_sizes(make_backend: MakeBackend, page_size: int) -> None:
    run_chunks_then_decode(make_backend, page_size, 32, 8, 128)


def run_chunks_then_decode(
    make_backend: MakeBackend, page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    oracle = oracle_over(quantized_layout(page_size, num_kv_heads, head_dim), NUM_PAGES, num_q_heads, make_backend)
    a, b, c = oracle.add(140), oracle.add(63), oracle.add(9)
    # A whole prompt: its KV need not be read from pages.
    oracle.step("prefill", {a: 117, c: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {b: 60, a: 1, c: 5}, max_error=MAX_ERROR)
    oracle.step("prefill", {a: 13}, max_error=MAX_ERROR)
    for _ in range(3):
        oracle.step("decode", {c: 1, a: 1, b: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {a: 1}, max_error=MAX_ERROR)
    is_written = torch.zeros(NUM_PAGES, page_size, dtype=torch.bool, device="cuda")
    for sequence in (a, b, c):
        for position in range(sequence.cached_len):
            is_written[sequence.page_ids[position // page_size], position % page_size] = True
    finite = oracle.kv.float().isfinite().movedim(3, 1).flatten(2)
    assert torch.equal(finite.all(2), is_written) and torch.equal(finite.any(2), is_written)


@pytest.mark.parametrize("make_backend", [flashinfer, triton, reference])
def test_long_prompt_continues_a_shared_prefix(make_backend: MakeBackend) -> None:
    oracle = oracle_over(quantized_layout(16, 2, 128), 400, 8, make_backend)
    a, b = oracle.add(2100), oracle.add(2400)
    for of_a, of_b in zip(oracle.qkv[id(a)], oracle.qkv[id(b)], strict=True):
        of_b[:, :2048] = of_a[:, :2048]
    shared = TokenSequence(b.token_ids, 2400, [*a.page_ids[:128], *b.page_ids[128:]], cached_len=2048)
    oracle.qkv[id(shared)] = oracle.qkv[id(b)]
    oracle.step("prefill", {a: 2099}, max_error=MAX_ERROR)
    oracle.step("prefill", {shared: 351}, max_error=MAX_ERROR)
    oracle.step("decode", {shared: 1, a: 1}, max_error=MAX_ERROR)


class GraphedDecode(HeadBackend):
    """Decode steps of one size as a CUDA graph per layer, padded with random rows."""

    def __init__(
        self,
        pool: KvPool,
        num_q_heads: int,
        make_backend: Callable[[KvPool, int], GraphableHeadBackend],
        batch_size: int,
    ) -> None:
        assert isinstance(pool.layout, KvHeadLayout)
        self._backend = make_backend(pool, num_q_heads)
        self._graphed: GraphedHeadAttention = self._backend.for_graphs([batch_size, 1], pool.num_pages)[batch_size]
        self._batch_size = batch_size
        self._num_outputs = num_q_heads * pool.layout.head_dim
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._is_decode = False

    def plan(self, batch: Batch) -> None:
        self._is_decode = batch.mode == "decode"
        if self._is_decode:
            self._graphed.plan(batch.sequences)
        else:
            self._backend.plan(batch)

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        if not self._is_decode:
            return self._backend.attend(qkv, rotation, qk_norm, layer)
        if layer not in self._graphs:
            self._graphs[layer] = self._capture(qkv, rotation, qk_norm, layer)
        graph, given, out = self._graphs[layer]
        given[: len(qkv)].copy_(qkv)
        graph.replay()
        return out[: len(qkv)].clone()

    def _capture(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        given = torch.randn(self._batch_size, *qkv.shape[1:], device=qkv.device).to(qkv.dtype)
        given[: len(qkv)].copy_(qkv)
        out = torch.empty(self._batch_size, self._num_outputs, dtype=qkv.dtype, device=qkv.device)
        rotation = Rotation(rotation.tables, self._graphed.positions, qkv.dtype)

        def run() -> None:
            # attend may overwrite its input.
            out.copy_(self._graphed.attend(given.clone(), rotation, qk_norm, layer))

        with GraphCapture(qkv.device) as capture:
            return capture.capture(run, run), given, out


@pytest.mark.parametrize("make_backend", [flashinfer, triton])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 24, 64, 128, 129, 256])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64)])
def test_decode_steps_as_graphs(
    make_backend: Callable[[KvPool, int], GraphableHeadBackend],
    batch_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    rng = random.Random(batch_size)
    lengths = [rng.choice((1, 16, 100, rng.randint(1, 700))) for _ in range(batch_size - batch_size // 8)]
    lengths[0] = 2000
    num_pages = sum((n + 3) // 16 + 1 for n in lengths)
    oracle = oracle_over(
        quantized_layout(16, num_kv_heads, head_dim),
        num_pages,
        num_q_heads,
        functools.partial(GraphedDecode, make_backend=make_backend, batch_size=batch_size),
    )
    sequences = [oracle.add(length + 3) for length in lengths]
    for start in range(0, len(sequences), 32):
        some = zip(sequences[start : start + 32], lengths[start : start + 32], strict=True)
        oracle.step("prefill", dict(some), max_error=MAX_ERROR)
    # The second step replays the first's graph; the third has more padding.
    for chosen in (sequences, sequences, sequences[: -(-len(sequences) // 2)]):
        oracle.step("decode", dict.fromkeys(chosen, 1), max_error=MAX_ERROR)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(9, 3), (32, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_of_a_fixed_size(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    oracle = oracle_over(
        quantized_layout(16, num_kv_heads, head_dim),
        NUM_PAGES,
        num_q_heads,
        lambda pool, heads: FixedSizePrefill(flashinfer(pool, heads), 512, 4),
    )
    long, middle, short, one = oracle.add(2000), oracle.add(515), oracle.add(4), oracle.add(1)
    oracle.step("prefill", {long: 512}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 300, short: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {short: 1, long: 1, one: 1, middle: 509}, max_error=MAX_ERROR)
    oracle.step("prefill", {middle: 5}, max_error=MAX_ERROR)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keep_kv", [True, False])
@pytest.mark.parametrize("num_tokens", [30, 300])
def test_written_pages_match_plain_torch(num_tokens: int, keep_kv: bool, head_dim: int) -> None:
    from tandem.engine.attention.norm_rotate_write import norm_rotate_write

    device, layer, num_q, num_kv = torch.device("cuda", 0), 1, 9, 3
    scales = KvScales((1.0, 0.02, 1.0), (1.0, 0.007, 1.0))
    layout = quantized_layout(16, num_kv, head_dim, num_layers=3)
    pool = layout.view(torch.full((40, layout.page_bytes), 7, dtype=torch.uint8, device=device))
    generator = torch.Generator(device).manual_seed(head_dim)
    qkv = torch.randn(num_tokens, num_q + 2 * num_kv, head_dim, device=device, generator=generator).bfloat16()
    special = torch.tensor([1e4, -1e4, math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-30], device=device).bfloat16()
    qkv[3, num_q, :8] = qkv[5, -1, :8] = special
    slots = torch.randperm(40 * 16, device=device, generator=generator)[:num_tokens]
    # Token 3 is rotated by angle zero.
    positions = torch.randint(0, 500, (num_tokens,), device=device, generator=generator)
    positions[3] = 0
    rotation = Rotation(RotaryEmbedding(head_dim, 1e4, None, 500, device), positions, torch.float32)
    given = qkv.clone()
    norm_rotate_write(qkv, num_q, rotation, None, pool, layer, slots, kv_scales=scales, keep_kv=keep_kv)
    _, k, v = given.split([num_q, num_kv, num_kv], dim=1)
    of_keys, of_values = Quantizer(layout, 0.02, device), Quantizer(layout, 0.007, device)
    keys, values = pool.view(torch.uint8)[slots // 16, layer, :, slots % 16].unbind(1)
    # NaN has two encodings.
    expected = of_values.quantized(v)
    is_nan = expected & 0x7F == 0x7F
    assert is_nan.sum() == 1
    assert torch.equal(values[~is_nan], expected[~is_nan]) and (values[is_nan] & 0x7F == 0x7F).all()
    # Rotated keys may differ in float32's last bit, so ties occasionally round differently.
    found, turned = of_keys.numbers(keys).float(), rotate(k.float(), *rotation.cos_sin)
    expected = of_keys.numbers(of_keys.quantized(turned)).float()
    assert (found != expected).float().mean() < 0.01
    usual = turned.isfinite() & (turned.abs() < 448 * 0.02)
    assert ((found - turned).abs() <= turned.abs() / 15 + 0.02 * 2.0**-9)[usual].all()
    largest = 448 * 0.02
    torch.testing.assert_close(found[3, 0, :4].cpu(), torch.tensor([1, -1, 1, -1]) * largest, rtol=4e-3, atol=0)
    assert found[3, 0, 4].isnan()
    if keep_kv:
        given[:, num_q : num_q + num_kv] = of_keys.numbers(keys)
        given[:, -num_kv:] = of_values.numbers(values)
    torch.testing.assert_close(qkv, given, rtol=0, atol=0, equal_nan=True)
    pool.view(torch.uint8)[slots // 16, layer, :, slots % 16] = 7
    assert (pool.view(torch.uint8) == 7).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_and_prefill_kernels_write_the_same_pages(head_dim: int) -> None:
    from tandem.engine.attention.norm_rotate_write import norm_rotate_write
    from tandem.engine.attention.paged_decode import PagedDecode
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    device = torch.device("cuda", 0)
    scales = KvScales((1.0, 0.02, 1.0), (1.0, 0.007, 1.0))
    layout = quantized_layout(16, 2, head_dim, num_layers=3)
    pools = [CudaKvPool(layout, 8, device) for _ in range(2)]
    qkv = torch.randn(2, 12, head_dim, device=device).bfloat16()
    qkv[0, -1, :5] = torch.tensor([1e4, -1e4, math.inf, -math.inf, math.nan], device=device).bfloat16()
    norm = QkNorm(torch.randn(2, head_dim, device=device).bfloat16(), 1e-6)
    sequences = [
        TokenSequence([0] * (n + 1), n + 1, [1 + i * 3, 2 + i * 3], cached_len=n) for i, n in enumerate((5, 31))
    ]
    for sequence in sequences:
        sequence.extend(1)
    rotation = Rotation(
        RotaryEmbedding(head_dim, 1e4, None, 64, device), torch.tensor([5, 31], device=device), torch.bfloat16
    )
    kv, kv_of_other = (layout.view(pool.memory) for pool in pools)
    decode = PagedDecode(pools[0], 8, 2, scales)
    decode.launch(decode.plan(sequences, 2).to(device)[0], qkv, rotation, norm, 1)
    slots = torch.tensor([16 + 5, 5 * 16 + 15], device=device)
    whole = layout.view(pools[1].memory_and_dummy)
    norm_rotate_write(qkv, 8, rotation, norm, whole, 1, slots, kv_scales=scales)
    is_other = kv[:, :, 0].float() != kv_of_other[:, :, 0].float()
    assert is_other.sum() <= 4
    torch.testing.assert_close(kv[:, :, 0].float(), kv_of_other[:, :, 0].float(), rtol=0.13, atol=2.0**-9)
    torch.testing.assert_close(kv[:, :, 1].float(), kv_of_other[:, :, 1].float(), rtol=0, atol=0, equal_nan=True)
    assert kv.view(torch.uint8)[:, 1].any() and not kv.view(torch.uint8)[:, [0, 2]].any()


@pytest.mark.parametrize("make_backend", [flashinfer, triton])
@pytest.mark.parametrize("batch_size", [4, 140])
def test_device_is_never_awaited(make_backend: MakeBackend, batch_size: int) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    device = torch.device("cuda", 0)
    attention = make_backend(CudaKvPool(quantized_layout(16, 2, 64), 2 * batch_size, device), 4)
    rotation_tables = RotaryEmbedding(64, 1e4, None, 64, device)

    def forward(mode: str, sequences: list[TokenSequence]) -> None:
        num_tokens = sum(s.extend_len for s in sequences)
        qkv = torch.randn(num_tokens, 8, 64, device=device).bfloat16()
        rotation = Rotation(rotation_tables, torch.zeros(num_tokens, dtype=torch.int32, device=device), qkv.dtype)
        attention.plan(Batch("prefill" if mode == "prefill" else "decode", sequences))
        for layer in range(2):
            attention.attend(qkv, rotation, None, layer)

    def run() -> None:
        sequences = [TokenSequence([0] * 30, 30, [2 * i, 2 * i + 1]) for i in range(batch_size)]
        for mode, num_tokens in (("prefill", 20), ("prefill", 9), ("decode", 1)):
            for sequence in sequences:
                sequence.extend(num_tokens)
            forward(mode, sequences)
            for sequence in sequences:
                sequence.complete_extend()

    run()
    torch.cuda.synchronize()
    with no_waiting():
        run()
    torch.cuda.synchronize()
