"""Lower bounds of run times, against hand calculation and the H200 measurements of docs/benchmarks.md."""

from dataclasses import replace

import pytest

from tandem.engine.floors import (
    Limits,
    decode_floor,
    kv_bytes_per_token,
    prefill_floor,
    read_weight_bytes,
    weight_bytes,
)
from tandem.engine.models.config import ModelConfig
from tests.fakes.model_shapes import LLAMA_8B, QWEN_0_6B

SMALL = replace(
    LLAMA_8B,
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
# Measured beside the floors below: copy 4.1 to 4.2 TB/s, matmul 770 to 790 TFLOP/s.
H200 = Limits(4.15e12, 780e12)
# Prompts of 1,024 tokens with half of 256 outputs, in milliseconds.
DECODE_FLOORS_MS = {
    "llama": (LLAMA_8B, {1: 3.60, 8: 3.85, 32: 4.71, 128: 8.16, 256: 12.8}),
    "qwen": (QWEN_0_6B, {1: 0.32, 8: 0.54, 32: 1.30, 128: 4.33, 256: 8.37}),
}
PREFILL_FLOORS = {(1, 512): 56_100, (1, 8192): 49_100, (8, 8192): 49_100, (32, 2048): 54_500, (64, 512): 56_100}


def test_floors_count_reads_and_computation() -> None:
    # Two layers: q and o 64 x 64, k and v 64 x 32, three MLP matrices 64 x 128; the head 300 x 64.
    layers, head = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128), 300 * 64
    slow_memory, slow_math = Limits(1.0, 1e30), Limits(1e30, 1.0)
    kv_of_a_token = 2 * 2 * 32
    assert decode_floor(SMALL, slow_memory, 3, 10) == 2 * (layers + head) + 2 * 3 * 10 * kv_of_a_token
    assert decode_floor(SMALL, slow_memory, 3, 10, "fp8_e4m3") == 2 * (layers + head) + 3 * 10 * kv_of_a_token
    assert decode_floor(SMALL, slow_math, 3, 10) == 2 * 3 * (layers + head)
    assert prefill_floor(SMALL, slow_memory, 3, 10) == 2 * (layers + head)
    # 55 visible query-key pairs, 64 numbers each over all heads, two products of two operations.
    attention = 2 * 55 * 64 * 4
    assert prefill_floor(SMALL, slow_math, 3, 10) == 3 * (2 * layers * 10 + 2 * head + attention)


def test_fp8_weights_are_half_as_large_and_multiplied_twice_as_fast() -> None:
    layers, head = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128), 300 * 64
    fp8 = SMALL.quantized("fp8")
    slow_memory, slow_math = Limits(1.0, 1e30), Limits(1e30, 1.0)
    # The logits matrix and KV stay bfloat16.
    assert decode_floor(fp8, slow_memory, 3, 10) == layers + 2 * head + 2 * 3 * 10 * 2 * 2 * 32
    assert decode_floor(fp8, slow_math, 3, 10) == 2 * 3 * (layers / 2 + head)
    assert prefill_floor(fp8, slow_memory, 3, 10) == layers + 2 * head
    assert prefill_floor(fp8, slow_math, 3, 10) == 3 * (2 * layers / 2 * 10 + 2 * head + 2 * 55 * 64 * 4)
    assert weight_bytes(LLAMA_8B.quantized("fp8")) == pytest.approx(6.98e9 + 2 * 2 * 0.525e9, rel=0.001)
    assert decode_floor(LLAMA_8B.quantized("fp8"), H200, 1, 1152) == pytest.approx(1.97e-3, rel=0.01)


def test_untied_embedding_takes_memory_but_is_not_read() -> None:
    tied = replace(SMALL, tie_word_embeddings=True)
    assert weight_bytes(tied) == read_weight_bytes(tied) == read_weight_bytes(SMALL)
    assert weight_bytes(SMALL) == read_weight_bytes(SMALL) + 2 * 300 * 64
    # Published sizes: 8.03 billion parameters, and 0.6 billion.
    assert weight_bytes(LLAMA_8B) == pytest.approx(2 * 8.03e9, rel=0.001)
    assert weight_bytes(QWEN_0_6B) == pytest.approx(2 * 0.596e9, rel=0.001)


def test_a_token_has_keys_and_values_in_every_layer() -> None:
    assert kv_bytes_per_token(LLAMA_8B) == 128 * 1024
    assert kv_bytes_per_token(QWEN_0_6B) == 112 * 1024
    assert kv_bytes_per_token(LLAMA_8B, "fp8_e4m3") == 64 * 1024


@pytest.mark.parametrize(("model", "floors"), DECODE_FLOORS_MS.values(), ids=DECODE_FLOORS_MS)
def test_decode_floors_match_the_documented_ones(model: ModelConfig, floors: dict[int, float]) -> None:
    for batch_size, floor_ms in floors.items():
        assert decode_floor(model, H200, batch_size, 1152) * 1e3 == pytest.approx(floor_ms, rel=0.03)


@pytest.mark.parametrize(("shape", "tokens_per_s"), PREFILL_FLOORS.items())
def test_prefill_floors_match_the_documented_ones(shape: tuple[int, int], tokens_per_s: int) -> None:
    num_requests, prompt_len = shape
    floor_s = prefill_floor(LLAMA_8B, H200, num_requests, prompt_len)
    assert num_requests * prompt_len / floor_s == pytest.approx(tokens_per_s, rel=0.03)
