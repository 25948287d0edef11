"""Latents of 8 bits: kernels write plain torch's bytes, and attend to them, over pages full of NaN."""

import pytest
import torch

from tandem.engine.attention.base import LatentBackend
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_reference import LatentReferenceAttention
from tandem.engine.attention.scales import KvScales
from tandem.engine.kvcache.pool import KvPool
from tests.fakes.latent_attention import LatentOracle
from tests.gpu.engine.attention.test_latent_triton import (
    KV_RANK,
    MAX_ERROR,
    MAX_TOKENS,
    NUM_LAYERS,
    ROPE_DIM,
    SIZES,
    FixedSizeLatents,
    check_chunks,
    check_fixed_sizes,
    run,
)

# Per layer, for latents of about 1; of values, unused.
SCALES = KvScales((0.01, 0.25), (3.0, 3.0))


def triton(pool: KvPool, num_q_heads: int) -> LatentBackend:
    from tandem.engine.attention.latent_triton import LatentTritonAttention
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert isinstance(pool, CudaKvPool)
    return LatentTritonAttention(pool, num_q_heads, SCALES)


def reference(pool: KvPool, num_q_heads: int) -> LatentBackend:
    return LatentReferenceAttention(pool, num_q_heads, SCALES)


def new_pool(page_size: int, dtype: str = "bfloat16", kv_rank: int = KV_RANK) -> KvPool:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    layout = LatentLayout(NUM_LAYERS, page_size, kv_rank, ROPE_DIM, dtype, "float8_e4m3fn")
    return CudaKvPool(layout, MAX_TOKENS // page_size + 16, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("page_size", "num_heads", "nope_dim", "value_dim"),
    [*((16, *sizes) for sizes in SIZES), (1, *SIZES[0]), (64, *SIZES[0])],
)
def test_chunks_decode_and_mixed_steps(page_size: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
    oracle = LatentOracle(new_pool(page_size), triton, num_heads, nope_dim, value_dim, SCALES)
    check_chunks(oracle)


@pytest.mark.parametrize("kv_rank", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_latents(kv_rank: int, dtype: str) -> None:
    oracle = LatentOracle(new_pool(16, dtype, kv_rank), triton, 16, 128, 128, SCALES)
    long, short = oracle.add(900), oracle.add(9)
    oracle.step("prefill", {long: 700, short: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 100}, max_error=MAX_ERROR)
    oracle.step("decode", {short: 1, long: 1}, max_error=MAX_ERROR)


@pytest.mark.parametrize(
    ("num_decoded", "num_heads", "nope_dim", "value_dim"), [*((3, *sizes) for sizes in SIZES), (40, *SIZES[0])]
)
def test_steps_of_fixed_sizes(num_decoded: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
    oracle = LatentOracle(
        new_pool(16),
        lambda pool, heads: FixedSizeLatents(triton(pool, heads), num_decoded, 512),
        num_heads,
        nope_dim,
        value_dim,
        SCALES,
    )
    check_fixed_sizes(oracle)


def test_pages_and_outputs_as_in_plain_torch() -> None:
    outputs, latents = [], []
    for make_backend in (triton, reference):
        oracle = LatentOracle(new_pool(16), make_backend, 16, 128, 128, SCALES)
        sequences = [oracle.add(n) for n in (700, 33)]
        run(oracle, "prefill", sequences, 32)
        # By the kernels of many rows, then of few.
        run(oracle, "prefill", sequences[:1], 660)
        outputs.append(run(oracle, "decode", sequences, 1).double())
        latents.append(oracle.pages.latents.view(torch.uint8))
    assert (outputs[0] - outputs[1]).norm() <= MAX_ERROR * outputs[1].norm()
    # Sums of squares in another order now and then round a number to its neighbor.
    apart = (latents[0].int() - latents[1].int()).abs()
    assert apart.max() <= 1 and (apart == 1).double().mean() <= 1e-4


def test_numbers_beyond_the_largest_and_nan() -> None:
    """Saturate, and stay NaN: by the kernel of few rows and by that of many."""
    for num_tokens in (1, 9):
        oracle = LatentOracle(new_pool(16), triton, 16, 128, 128, SCALES)
        sequence = oracle.add(num_tokens)
        # Others become small, this one about the root of their number.
        oracle.projected[id(sequence)].kv[0, 0, 7] = 1e4
        oracle.projected[id(sequence)].kv[1, 0, 7] = float("nan")
        run(oracle, "prefill", [sequence], num_tokens)
        written = oracle.pages.latents[sequence.page_ids[0], :, 0].float()
        assert written[0, 7].abs() == 448 and written[1].isnan().all()
