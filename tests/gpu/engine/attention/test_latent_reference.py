"""Plain latent attention on a GPU, which serves latents there."""

import pytest
import torch

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_reference import LatentReferenceAttention
from tests.fakes.latent_attention import LatentOracle

NUM_LAYERS, NUM_PAGES = 2, 200
# The sizes of published models, with fewer heads.
NUM_HEADS, KV_RANK, NOPE_DIM, ROPE_DIM, VALUE_DIM = 4, 512, 128, 64, 128


@pytest.mark.parametrize(("dtype", "max_error"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_chunks_decode_and_mixed_steps(dtype: str, max_error: float) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    layout = LatentLayout(NUM_LAYERS, 16, KV_RANK, ROPE_DIM, dtype)
    pool = CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0))
    oracle = LatentOracle(pool, LatentReferenceAttention, NUM_HEADS, NOPE_DIM, VALUE_DIM)
    long, middle, short = oracle.add(900), oracle.add(300), oracle.add(9)
    oracle.step("prefill", {long: 700, short: 1}, max_error=max_error)
    oracle.step("prefill", {middle: 250, long: 150}, max_error=max_error)
    oracle.step("decode", {short: 1, long: 1}, max_error=max_error)
    oracle.step("mixed", {long: 1, short: 1, middle: 40}, num_mixed=2, max_error=max_error)
    oracle.step("decode", {middle: 1, short: 1, long: 1}, max_error=max_error)
