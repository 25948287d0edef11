"""One worker's estimate against what was measured on H200s (docs/benchmarks.md, docs/reports/h200)."""

from dataclasses import replace

import pytest

from deploy.estimate.gpus import GPUS
from deploy.estimate.worker import Worker
from engine.models.config import ModelConfig
from tests.fakes.model_shapes import LLAMA_8B, QWEN_0_6B

H200 = GPUS["h200"]
WITHIN = 0.15
# Milliseconds of a step by batch size, sequences of 1,152 tokens.
DECODE_MS = {
    "llama": (LLAMA_8B, {1: 4.07, 8: 4.48, 32: 5.96, 128: 10.87, 256: 17.9}),
    "qwen": (QWEN_0_6B, {1: 0.69, 8: 0.96, 32: 2.20, 128: 5.84, 256: 10.2}),
}
# Prompt tokens per second by number and length of prompts, in chunks of 16,384.
PREFILLS = {(1, 512): 36_800, (1, 8192): 40_300, (8, 8192): 39_300, (32, 2048): 43_600, (64, 512): 44_700}
QWEN_PREFILLS = {(1, 512): 62_300, (1, 8192): 298_000, (8, 8192): 310_000, (32, 2048): 455_000}
# Pages of 16 tokens.
POOLS = {"prefill": 54_712, "decode": 54_283, "both": 54_283}


@pytest.mark.parametrize(("model", "measured"), DECODE_MS.values(), ids=DECODE_MS)
def test_decode_steps(model: ModelConfig, measured: dict[int, float]) -> None:
    worker = Worker(model, H200)
    for batch_size, milliseconds in measured.items():
        assert worker.decode_step(batch_size, 1152) * 1e3 == pytest.approx(milliseconds, rel=WITHIN)


@pytest.mark.parametrize(
    ("model", "measured"), [(LLAMA_8B, PREFILLS), (QWEN_0_6B, QWEN_PREFILLS)], ids=["llama", "qwen"]
)
def test_prefills(model: ModelConfig, measured: dict[tuple[int, int], int]) -> None:
    worker = Worker(model, H200, chunk_size=16_384)
    for (num_requests, prompt_len), tokens_per_s in measured.items():
        estimated = num_requests * prompt_len / worker.prefill(num_requests, prompt_len)
        assert estimated == pytest.approx(tokens_per_s, rel=WITHIN)


def test_fp8_weights_leave_room_and_take_less_time() -> None:
    plain, fp8 = Worker(LLAMA_8B, H200), Worker(LLAMA_8B.quantized("fp8"), H200)
    more = fp8.pool_tokens("decode", 1) - plain.pool_tokens("decode", 1)
    assert more * 128 * 1024 == pytest.approx(6.98e9, rel=0.001)
    assert fp8.decode_step(1, 1152) == pytest.approx(plain.decode_step(1, 1152) - 6.98e9 / 4.15e12, rel=0.02)
    assert fp8.prefill(8, 8192) < 0.7 * plain.prefill(8, 8192)
    with pytest.raises(ValueError, match="A100 80GB SXM does not multiply FP8 weights"):
        Worker(LLAMA_8B.quantized("fp8"), GPUS["a100"])


def test_the_first_token_of_a_prompt_on_an_idle_cluster() -> None:
    assert Worker(LLAMA_8B, H200).prefill(1, 4096) * 1e3 == pytest.approx(98.9, rel=WITHIN)
    assert Worker(LLAMA_8B, H200).prefill(1, 2048) * 1e3 == pytest.approx(49.2, rel=WITHIN)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_pools(role: str) -> None:
    pool_tokens = Worker(LLAMA_8B, H200).pool_tokens(role, 16_384)  # type: ignore[arg-type]
    assert pool_tokens / 16 == pytest.approx(POOLS[role], rel=0.01)


def test_quantized_pages_hold_twice_the_tokens_and_take_half_the_time_to_ship_and_to_read() -> None:
    whole, quantized = Worker(LLAMA_8B, H200), Worker(LLAMA_8B, H200, kv_cache_dtype="fp8_e4m3")
    assert quantized.pool_tokens("decode", 1) == pytest.approx(2 * whole.pool_tokens("decode", 1), rel=0.001)
    assert quantized.transfer(4096) == pytest.approx(whole.transfer(4096) / 2)
    reading = whole.decode_step(32, 2048) - whole.decode_step(32, 1024)
    assert quantized.decode_step(32, 2048) - quantized.decode_step(32, 1024) == pytest.approx(reading / 2)
    with pytest.raises(ValueError, match="A100 80GB SXM has no kernels for KV pages of fp8_e4m3"):
        Worker(LLAMA_8B, GPUS["a100"], kv_cache_dtype="fp8_e4m3")


def test_a_pool_is_what_the_share_of_the_memory_leaves() -> None:
    less = Worker(LLAMA_8B, H200, mem_fraction_static=0.5)
    whole = Worker(LLAMA_8B, H200)
    fewer = whole.pool_tokens("decode", 1) - less.pool_tokens("decode", 1)
    assert fewer * 128 * 1024 == pytest.approx(0.38 * H200.memory, rel=0.001)
    with pytest.raises(ValueError, match="a larger mem_fraction_static"):
        Worker(LLAMA_8B, H200, mem_fraction_static=0.125).pool_tokens("decode", 4096)


def test_older_gpus_run_small_steps_without_our_own_kernels() -> None:
    older = Worker(LLAMA_8B, replace(H200, has_own_kernels=False))
    newer = Worker(LLAMA_8B, H200)
    assert older.decode_step(16, 1152) > newer.decode_step(16, 1152)
    assert older.decode_step(17, 1152) == newer.decode_step(17, 1152)


def test_a_handover_takes_its_bytes_time_on_the_link() -> None:
    assert Worker(LLAMA_8B, H200).transfer(4096) == pytest.approx(4096 * 128 * 1024 / 382e9)
