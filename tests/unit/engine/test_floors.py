"""Lower bounds of run times, against hand calculation and the H200 measurements of docs/benchmarks.md."""

from dataclasses import replace

import pytest

from tandem.engine.floors import (
    Limits,
    attention_flops,
    decode_floor,
    decode_flops,
    kv_bytes_per_token,
    mixed_floor,
    prefill_floor,
    prefill_flops,
    read_weight_bytes,
    weight_bytes,
)
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.experts import ExpertsConfig, Routing
from tandem.engine.models.latent import IndexerConfig, LatentConfig
from tests.fakes.model_shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    LLAMA_8B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN_0_6B,
)

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
# Three layers, the first dense; 2 of 4 experts of size 32, beside a shared one of size 48 with a gate.
SPARSE = replace(
    SMALL,
    num_layers=3,
    experts=ExpertsConfig(
        num_experts=4,
        intermediate_size=32,
        routing=Routing("softmax", 2),
        shared_intermediate_size=48,
        shared_gate=True,
        dense_layers=(0,),
    ),
)
# q and o 64 x 64, k and v 64 x 32; three matrices of an MLP; routers have a row per expert, and one for the gate.
SPARSE_PROJECTIONS = 3 * (2 * 64 * 64 + 2 * 64 * 32) + 3 * 64 * 128 + 2 * 3 * 64 * 48
SPARSE_ROUTERS, ONE_EXPERT, HEAD = 2 * 64 * 5, 2 * 3 * 64 * 32, 300 * 64
# 4 heads of queries and keys of 12 + 4 numbers and of values of 8 numbers; latents of 20 + 4 numbers.
LATENTS = LatentConfig(q_rank=0, kv_rank=20, nope_dim=12, rope_dim=4, value_dim=8)
LATENT = replace(SMALL, architecture="DeepseekV3ForCausalLM", num_kv_heads=4, latent=LATENTS)
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


def test_a_mixed_step_reads_keys_and_values_after_the_products() -> None:
    layers, head = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128), 300 * 64
    slow_memory, slow_math = Limits(1.0, 1e30), Limits(1e30, 1.0)
    assert mixed_floor(SMALL, slow_memory, 3, 10, 20, 5) == decode_floor(SMALL, slow_memory, 3, 10)
    # Logits of the three, and of the prompt's last token, whose 20 tokens see 5 and each other.
    attention = 2 * (20 * 5 + 20 * 21 // 2) * 64 * 4
    assert mixed_floor(SMALL, slow_math, 3, 10, 20, 5) == 2 * (layers * 23 + head * 4) + attention


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


def test_a_step_reads_the_experts_that_it_touches() -> None:
    common = SPARSE_PROJECTIONS + SPARSE_ROUTERS + HEAD
    assert read_weight_bytes(SPARSE, 1) == 2 * (common + 2 * ONE_EXPERT)
    # Each of two tokens misses an expert half of the times, so both miss a quarter of the experts.
    assert read_weight_bytes(SPARSE, 2) == 2 * (common + 3 * ONE_EXPERT)
    assert read_weight_bytes(SPARSE, 100) == 2 * (common + 4 * ONE_EXPERT)
    assert weight_bytes(SPARSE) == 2 * (common + 4 * ONE_EXPERT + HEAD)
    slow_memory = Limits(1.0, 1e30)
    kv_of_a_token = 3 * 2 * 32
    assert decode_floor(SPARSE, slow_memory, 2, 10) == read_weight_bytes(SPARSE, 2) + 2 * 2 * 10 * kv_of_a_token
    assert prefill_floor(SPARSE, slow_memory, 1, 2) == read_weight_bytes(SPARSE, 2)


def test_a_token_multiplies_only_its_experts() -> None:
    slow_math = Limits(1e30, 1.0)
    of_layers = SPARSE_PROJECTIONS + SPARSE_ROUTERS + 2 * ONE_EXPERT
    assert decode_floor(SPARSE, slow_math, 3, 10) == decode_flops(SPARSE, 3) == 2 * 3 * (of_layers + HEAD)
    attention = 2 * 55 * 64 * 6
    flops = 3 * (2 * of_layers * 10 + 2 * HEAD + attention)
    assert prefill_floor(SPARSE, slow_math, 3, 10) == prefill_flops(SPARSE, 3, 10) == flops


def test_routers_are_never_fp8() -> None:
    fp8 = SPARSE.quantized("fp8")
    assert read_weight_bytes(fp8, 1) == SPARSE_PROJECTIONS + 2 * ONE_EXPERT + 2 * (SPARSE_ROUTERS + HEAD)
    assert weight_bytes(fp8) == SPARSE_PROJECTIONS + 4 * ONE_EXPERT + 2 * (SPARSE_ROUTERS + 2 * HEAD)
    of_layers = (SPARSE_PROJECTIONS + 2 * ONE_EXPERT) / 2 + SPARSE_ROUTERS
    assert decode_floor(fp8, Limits(1e30, 1.0), 3, 10) == 2 * 3 * (of_layers + HEAD)
    assert decode_flops(fp8, 3) == decode_flops(SPARSE, 3)


def test_sizes_of_published_models_with_experts() -> None:
    """30.5 billion parameters, of which 3.3 for a token; 46.7, of which 12.9."""
    for model, num_parameters, num_active in ((QWEN3_30B_A3B, 30.5e9, 3.35e9), (MIXTRAL_8X7B, 46.7e9, 12.9e9)):
        assert weight_bytes(model) == pytest.approx(2 * num_parameters, rel=0.002)
        embedding = model.vocab_size * model.hidden_size
        assert read_weight_bytes(model, 1) + 2 * embedding == pytest.approx(2 * num_active, rel=0.002)
        assert decode_flops(model, 1) == read_weight_bytes(model, 1)
    # 128 * (1 - (15 / 16)^8) = 51.6 distinct experts of 9.44 MB in each of 48 layers.
    touched = read_weight_bytes(QWEN3_30B_A3B, 8) - read_weight_bytes(QWEN3_30B_A3B, 1)
    assert touched == pytest.approx(48 * (51.62 - 8) * 9.437e6, rel=0.001)


def test_latents_are_read_once_for_all_heads() -> None:
    # q 64 x 64, o 64 x 32; to the latent 64 x 24, from it 20 x 4 (12 + 8), which are never FP8.
    mlp, projections, plain = 3 * 64 * 128, 64 * 64 + 64 * 32, 64 * 24 + 20 * 80
    head = 300 * 64
    assert kv_bytes_per_token(LATENT) == 2 * 2 * 24
    assert weight_bytes(LATENT) == 2 * (2 * (mlp + projections + plain) + 2 * head)
    assert weight_bytes(LATENT.quantized("fp8")) == 2 * (mlp + projections) + 2 * (2 * plain + 2 * head)
    with_rank = replace(LATENT, latent=replace(LATENTS, q_rank=10))
    # 64 x 10 and 10 x 64 in the place of 64 x 64.
    assert weight_bytes(LATENT) - weight_bytes(with_rank) == 2 * 2 * (64 * 64 - 2 * 640)
    products = 2 * (mlp + projections + plain)
    slow_memory, slow_math = Limits(1.0, 1e30), Limits(1e30, 1.0)
    assert decode_floor(LATENT, slow_memory, 3, 10) == 2 * (products + head) + 3 * 10 * 96
    # A head's query multiplies 24 numbers of a token, its weight 20.
    assert decode_floor(LATENT, slow_math, 3, 10) == 2 * 3 * (products + head) + 2 * 30 * 2 * 4 * (24 + 20)
    # 55 pairs of queries and keys of 16 numbers and values of 8.
    assert prefill_floor(LATENT, slow_math, 1, 10) == 2 * products * 10 + 2 * head + 2 * 55 * 2 * 4 * (16 + 8)
    # The latent's 20 numbers are bytes, the rotated 4 are not.
    assert kv_bytes_per_token(LATENT, "fp8_e4m3") == 2 * (20 + 2 * 4)


def test_chosen_tokens_are_fewer_than_index_keys() -> None:
    latents = replace(LATENTS, q_rank=10)
    dense = replace(LATENT, architecture="DeepseekV32ForCausalLM", latent=latents)
    sparse = replace(dense, indexer=IndexerConfig(num_heads=3, head_dim=16, top_k=6))
    # Two layers: index queries 10 x 48; index keys 64 x 16, their heads' weights 64 x 3, which are never FP8.
    assert weight_bytes(sparse) - weight_bytes(dense) == 2 * 2 * (480 + 64 * 19)
    assert weight_bytes(sparse.quantized("fp8")) - weight_bytes(dense.quantized("fp8")) == 2 * (480 + 2 * 64 * 19)
    slow_memory, slow_math = Limits(1.0, 1e30), Limits(1e30, 1.0)
    assert kv_bytes_per_token(sparse) == 2 * 2 * (24 + 16)
    weights = read_weight_bytes(sparse, 3)
    assert decode_floor(sparse, slow_memory, 3, 10) == weights + 3 * 2 * 2 * (10 * 16 + 6 * 24)
    assert decode_floor(sparse, slow_memory, 3, 4) == weights + 3 * 2 * 2 * 4 * (16 + 24)
    products = decode_floor(sparse, slow_math, 1, 10) - decode_flops(sparse, 1)
    assert products == 2 * 2 * (6 * 4 * (24 + 20) + 10 * 3 * 16)
    # 10 tokens behind 2: the first 4 attend to 3 to 6 tokens, the others to 6; scores are of all 75 pairs.
    scores = 2 * 2 * 75 * 3 * 16
    assert attention_flops(sparse, 10, 2) == 2 * 2 * (3 + 4 + 5 + 6 + 6 * 6) * 4 * (16 + 8) + scores
    assert attention_flops(sparse, 3, 50) == 2 * 2 * 18 * 4 * (16 + 8) + 2 * 2 * (150 + 6) * 3 * 16


def test_sizes_of_published_models_with_latents() -> None:
    """15.7 billion parameters, of which 2.66 with the embedding for a token; 671, of which 37 without it."""
    assert weight_bytes(DEEPSEEK_V2_LITE) == pytest.approx(2 * 15.7e9, rel=0.002)
    embedding = 102_400 * 2048
    assert read_weight_bytes(DEEPSEEK_V2_LITE, 1) + 2 * embedding == pytest.approx(2 * 2.66e9, rel=0.005)
    assert weight_bytes(DEEPSEEK_V3) == pytest.approx(2 * 671e9, rel=0.002)
    assert read_weight_bytes(DEEPSEEK_V3, 1) == pytest.approx(2 * 37e9, rel=0.02)
    # DeepSeek-V3 report, section 2.1.1: 576 numbers a token and layer.
    assert kv_bytes_per_token(DEEPSEEK_V3) == 2 * 61 * 576


def test_an_embedding_takes_memory_but_is_not_read() -> None:
    tied = replace(SMALL, tie_word_embeddings=True)
    assert read_weight_bytes(tied, 1) == read_weight_bytes(SMALL, 1)
    assert weight_bytes(tied) == weight_bytes(SMALL) == read_weight_bytes(SMALL, 1) + 2 * 300 * 64
    # Published sizes: 8.03 billion parameters, and 0.6 billion, with the embedding once.
    assert weight_bytes(LLAMA_8B) == pytest.approx(2 * 8.03e9, rel=0.001)
    assert read_weight_bytes(QWEN_0_6B, 1) == pytest.approx(2 * 0.596e9, rel=0.001)


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
