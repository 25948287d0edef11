"""One worker's estimate against measurements on H200s (docs/benchmarks.md, docs/reports/h200)."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config import ROLES
from tandem.deploy.estimate.drafts import drafter_flops, drafter_weight_bytes
from tandem.deploy.estimate.experts import BFLOAT16_EXPERTS, experts_s
from tandem.deploy.estimate.gpus import GIB, GPUS
from tandem.deploy.estimate.latents import expansion_flops
from tandem.deploy.estimate.work import decode_work, prefill_work
from tandem.deploy.estimate.worker import CONTEXT, FP8_KV_READ_SHARE, KV_READ_SHARE, Worker
from tandem.engine.draft_models.config import DrafterConfig
from tandem.engine.floors import (
    decode_floor,
    decode_flops,
    expert_flops,
    expert_weight_bytes,
    kv_bytes_per_token,
    prefill_floor,
    prefill_flops,
    read_weight_bytes,
)
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.latent import IndexerConfig
from tests.fakes.model_shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3, LLAMA_8B, MIXTRAL_8X7B, QWEN3_30B_A3B, QWEN_0_6B

H200 = GPUS["h200"]
WITHIN = 0.15
LLAMA_8B_FP8 = LLAMA_8B.quantized("fp8")
# Measured milliseconds of a step of sequences of 1,152 tokens, by batch size, model and page dtype.
DECODE_MS = {
    "llama": (LLAMA_8B, "auto", {1: 3.94, 32: 5.69, 128: 9.69, 256: 16.37}),
    "llama, another run": (LLAMA_8B, "auto", {1: 3.97, 8: 4.36, 32: 5.75, 128: 10.32, 256: 16.47}),
    "llama, FP8 weights": (LLAMA_8B_FP8, "auto", {1: 2.52, 8: 2.85, 16: 3.49, 32: 4.25, 128: 9.10, 256: 15.82}),
    "llama, FP8 pages too": (LLAMA_8B_FP8, "fp8_e4m3", {1: 2.54, 32: 3.69, 128: 6.79, 256: 11.28}),
    "qwen": (QWEN_0_6B, "auto", {1: 0.67, 32: 2.12, 128: 5.33, 256: 9.34}),
}
# Prompt tokens/s by number and length of prompts, in chunks of 16,384.
PREFILLS = {(1, 512): 36_438, (1, 8192): 40_300, (8, 8192): 39_233, (32, 2048): 43_600, (64, 512): 44_431}
FP8_PREFILLS = {(1, 512): 51_999, (8, 8192): 63_196, (64, 512): 79_406}
QWEN_PREFILLS = {(1, 8192): 298_000, (8, 8192): 310_000, (32, 2048): 455_000}
# Milliseconds of single prompts by tokens (benchmarks.prefill_launch); all but the longest have graphs.
FORWARD_MS = {
    "llama": (LLAMA_8B, {128: 6.7, 512: 13.0, 1024: 25.1, 4096: 98.9}),
    "qwen": (QWEN_0_6B, {128: 1.9, 512: 2.5, 1024: 3.4, 4096: 11.6}),
}
# Milliseconds of mixed steps (benchmarks.mixed_forward) by sequences and their tokens, then by tokens of the chunk and
# of its prompt before it.
MIXED_MS = {
    (8, 4096): {(96, 0): 6.6, (224, 0): 8.8, (352, 2048): 12.2, (480, 0): 14.4, (480, 2048): 15.1, (2040, 0): 51.4},
    (64, 1024): {(128, 0): 8.7, (192, 0): 9.8, (384, 2048): 14.8, (448, 0): 15.2, (448, 2048): 16.0, (1984, 0): 53.6},
    (64, 4096): {(128, 0): 14.5, (192, 0): 15.3, (384, 2048): 19.9, (448, 0): 19.8, (448, 2048): 20.8, (1984, 0): 57.7},
    (128, 1024): {(128, 0): 11.6, (256, 0): 14.2, (384, 2048): 17.6, (512, 0): 19.6, (512, 2048): 20.5},
}
# Milliseconds of a step of DeepSeek-V2-Lite by tokens of each sequence and batch size (docs/gpu.md).
LATENT_DECODE_MS = {
    1024: {1: 1.82, 8: 5.58, 32: 9.02, 128: 10.50, 256: 12.23},
    16_384: {1: 1.97, 8: 6.53, 32: 12.80, 128: 25.71},
}
FP8_LATENT_DECODE_MS = {
    1024: {1: 1.98, 8: 5.52, 32: 8.88, 128: 10.32, 256: 12.00},
    16_384: {1: 2.08, 8: 6.37, 32: 12.66, 128: 25.09, 256: 41.18},
}
# Pages of 16 tokens, without graphs of steps with drafts.
POOLS = {"prefill": 54_712, "decode": 54_283, "both": 54_283}


@pytest.mark.parametrize(("model", "kv_cache_dtype", "measured"), DECODE_MS.values(), ids=DECODE_MS)
def test_decode_steps(model: ModelConfig, kv_cache_dtype: str, measured: dict[int, float]) -> None:
    worker = Worker(model, H200, kv_cache_dtype=kv_cache_dtype)
    for batch_size, milliseconds in measured.items():
        assert worker.decode_step(batch_size, 1152) * 1e3 == pytest.approx(milliseconds, rel=WITHIN)


@pytest.mark.parametrize(
    ("model", "measured"),
    [(LLAMA_8B, PREFILLS), (LLAMA_8B_FP8, FP8_PREFILLS), (QWEN_0_6B, QWEN_PREFILLS)],
    ids=["llama", "llama, FP8 weights", "qwen"],
)
def test_prefills(model: ModelConfig, measured: dict[tuple[int, int], int]) -> None:
    worker = Worker(model, H200, chunk_size=16_384)
    for (num_requests, prompt_len), tokens_per_s in measured.items():
        estimated = num_requests * prompt_len / worker.prefill(num_requests, prompt_len)
        assert estimated == pytest.approx(tokens_per_s, rel=WITHIN)


@pytest.mark.parametrize(("model", "measured"), FORWARD_MS.values(), ids=FORWARD_MS)
def test_single_prompts(model: ModelConfig, measured: dict[int, float]) -> None:
    for prompt_len, milliseconds in measured.items():
        assert Worker(model, H200).prefill(1, prompt_len) * 1e3 == pytest.approx(milliseconds, rel=WITHIN)


@pytest.mark.parametrize("sequences", MIXED_MS)
def test_mixed_steps(sequences: tuple[int, int]) -> None:
    for chunk, milliseconds in MIXED_MS[sequences].items():
        estimated = Worker(LLAMA_8B, H200).mixed_step(*sequences, *chunk) * 1e3
        assert estimated == pytest.approx(milliseconds, rel=WITHIN)


def test_fp8_weights_leave_room_and_take_less_time() -> None:
    plain, fp8 = Worker(LLAMA_8B, H200), Worker(LLAMA_8B_FP8, H200)
    more = fp8.pool_tokens("decode", 1) - plain.pool_tokens("decode", 1)
    assert more * 128 * 1024 == pytest.approx(6.98e9, rel=0.001)
    # Kernels take longer beyond their reads.
    saved = plain.decode_step(1, 1152) - fp8.decode_step(1, 1152)
    assert 0.7 * 6.98e9 / 4.15e12 < saved < 6.98e9 / 4.15e12
    assert fp8.prefill(8, 8192) < 0.7 * plain.prefill(8, 8192)
    with pytest.raises(ValueError, match="A100 80GB SXM does not multiply FP8 weights"):
        Worker(LLAMA_8B_FP8, GPUS["a100"])


def test_the_first_token_of_a_prompt_on_an_idle_cluster() -> None:
    assert Worker(LLAMA_8B, H200).prefill(1, 4096) * 1e3 == pytest.approx(98.9, rel=WITHIN)
    assert Worker(LLAMA_8B, H200).prefill(1, 2048) * 1e3 == pytest.approx(49.2, rel=WITHIN)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_pools(role: str) -> None:
    pool_tokens = Worker(LLAMA_8B, H200).pool_tokens(role, 16_384)  # type: ignore[arg-type]
    assert pool_tokens / 16 == pytest.approx(POOLS[role], rel=0.01)


def test_pool_of_an_h100() -> None:
    # Logged by role both with the defaults, which have graphs of steps with drafts.
    worker = Worker(LLAMA_8B, GPUS["h100"])
    assert worker.pool_tokens("both", 16_384) / 16 == pytest.approx(26_857, rel=0.002)
    memory = worker.memory("both")
    measured = {"weights": 16.43, "graphs": 0.79, "forward": 1.84}
    assert {name: getattr(memory, name) / GIB for name in measured} == pytest.approx(measured, rel=0.05)


def test_mixed_steps_sample_for_prompts_and_decoding_sequences() -> None:
    forwards = [Worker(LLAMA_8B, H200, mixed_steps=is_mixed).memory("both").forward for is_mixed in (False, True)]
    assert forwards[0] == Worker(LLAMA_8B, H200).memory("decode").forward < forwards[1]


def test_quantized_pages_hold_twice_the_tokens_and_take_half_the_time_to_ship_and_about_so_to_read() -> None:
    whole, quantized = Worker(LLAMA_8B, H200), Worker(LLAMA_8B, H200, kv_cache_dtype="fp8_e4m3")
    assert quantized.pool_tokens("decode", 1) == pytest.approx(2 * whole.pool_tokens("decode", 1), rel=0.001)
    assert quantized.transfer(4096) == pytest.approx(whole.transfer(4096) / 2)
    reading = whole.decode_step(32, 2048) - whole.decode_step(32, 1024)
    less = quantized.decode_step(32, 2048) - quantized.decode_step(32, 1024)
    assert less == pytest.approx(reading / 2 * KV_READ_SHARE / FP8_KV_READ_SHARE)
    with pytest.raises(ValueError, match="A100 80GB SXM has no kernels for KV pages of fp8_e4m3"):
        Worker(LLAMA_8B, GPUS["a100"], kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("kv_cache_dtype", "measured"), [("auto", LATENT_DECODE_MS), ("fp8_e4m3", FP8_LATENT_DECODE_MS)]
)
@pytest.mark.parametrize("kv_len", LATENT_DECODE_MS)
def test_steps_over_latents(kv_len: int, kv_cache_dtype: str, measured: dict[int, dict[int, float]]) -> None:
    worker = Worker(DEEPSEEK_V2_LITE, H200, kv_cache_dtype=kv_cache_dtype)
    for batch_size, measured_ms in measured[kv_len].items():
        assert worker.decode_step(batch_size, kv_len) * 1e3 == pytest.approx(measured_ms, rel=0.06)


def test_prefills_over_latents() -> None:
    worker = Worker(DEEPSEEK_V2_LITE, H200)
    assert 8 * 8192 / worker.prefill(8, 8192, 16_384) == pytest.approx(96_876, rel=0.06)
    # Keys and values of a cached prefix are made of its latents: 2 x 512 x 16 (128 + 128) in each of 27 layers.
    assert expansion_flops(DEEPSEEK_V2_LITE, 1000) == 27 * 2 * 512 * 16 * 256 * 1000
    assert expansion_flops(LLAMA_8B, 1000) == 0


def test_handovers_of_latents() -> None:
    """4.2 times fewer bytes than Llama-3.1-8B's keys and values."""
    latents, by_head = Worker(DEEPSEEK_V2_LITE, H200), Worker(LLAMA_8B, H200)
    assert (latents.kv_bytes_per_token, by_head.kv_bytes_per_token) == (31_104, 131_072)
    assert Worker(DEEPSEEK_V2_LITE, H200, kv_cache_dtype="fp8_e4m3").kv_bytes_per_token == 17_280
    assert by_head.transfer(4096) / latents.transfer(4096) == pytest.approx(131_072 / 31_104)


def test_latents_without_kernels_are_not_estimated() -> None:
    for gpu in ("a100", "b200"):
        with pytest.raises(ValueError, match=r"has no kernels for latent attention: plain torch computes it there"):
            Worker(DEEPSEEK_V2_LITE, GPUS[gpu])
    sparse = replace(
        DEEPSEEK_V3,
        architecture="DeepseekV32ForCausalLM",
        indexer=IndexerConfig(num_heads=64, head_dim=128, top_k=2048),
    )
    with pytest.raises(
        ValueError, match=r"^DeepseekV32ForCausalLM has sparse attention, for which there is no estimate"
    ):
        Worker(sparse, H200)


def test_a_pool_is_what_the_share_of_the_memory_leaves() -> None:
    less = Worker(LLAMA_8B, H200, mem_fraction_static=0.5)
    whole = Worker(LLAMA_8B, H200)
    fewer = whole.pool_tokens("decode", 1) - less.pool_tokens("decode", 1)
    assert fewer * 128 * 1024 == pytest.approx(0.38 * H200.memory, rel=0.001)
    with pytest.raises(ValueError, match="a larger --mem-fraction-static"):
        Worker(LLAMA_8B, H200, mem_fraction_static=0.125).pool_tokens("decode", 4096)


def test_older_gpus_run_small_steps_without_our_own_kernels() -> None:
    older = Worker(LLAMA_8B, replace(H200, has_own_kernels=False))
    newer = Worker(LLAMA_8B, H200)
    assert older.decode_step(16, 1152) > newer.decode_step(16, 1152)
    assert older.decode_step(17, 1152) == newer.decode_step(17, 1152)


def test_a_handover_takes_its_bytes_time_on_the_link() -> None:
    assert Worker(LLAMA_8B, H200).transfer(4096) == pytest.approx(4096 * 128 * 1024 / 382e9)


def test_workers_of_one_gpu_share_its_memory_and_rates() -> None:
    alone = Worker(LLAMA_8B, H200)
    shared = Worker(LLAMA_8B, H200.shared_by(2), workers_per_gpu=2)
    for role in ROLES:
        # Each has its own copy of the weights.
        assert 2 * shared.pool_tokens(role, 8192) < alone.pool_tokens(role, 8192)
        memory = shared.memory(role)
        pool = shared.pool_tokens(role, 8192) * shared.kv_bytes_per_token
        assert 2 * (memory.weights + memory.graphs + memory.forward + pool + CONTEXT) <= H200.memory
    assert shared.decode_step(64, 1152) > 1.8 * alone.decode_step(64, 1152)
    assert shared.prefill(1, 8192) > 1.9 * alone.prefill(1, 8192)


# --- experts ---


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize("shape", [QWEN3_30B_A3B, MIXTRAL_8X7B], ids=lambda shape: shape.architecture)
def test_models_with_experts_take_longer_than_their_floors(shape: ModelConfig, quantization: str) -> None:
    model = shape.quantized(quantization)
    worker = Worker(model, H200)
    for batch_size in (1, 8, 32, 128, 256):
        ratio = worker.decode_step(batch_size, 1152) / decode_floor(model, H200.limits, batch_size, 1152)
        assert 1.0 < ratio < (3 if batch_size == 1 else 1.6)
    # FP8 products reach little more than half of their rate.
    assert 1.0 < worker.prefill(8, 8192) / prefill_floor(model, H200.limits, 8, 8192) < 2


def test_requests_of_a_step_share_experts() -> None:
    worker = Worker(QWEN3_30B_A3B, H200)
    one, two, many = (worker.decode_step(size, 1) for size in (1, 2, 16))
    bandwidth = H200.limits.copy_bandwidth
    first, second = (expert_weight_bytes(QWEN3_30B_A3B, size) for size in (1, 2))
    assert two - one == pytest.approx((second - first) / bandwidth, rel=0.01)
    # Half of the 128 experts would be missed by 11 tokens of 8 each.
    assert many - one < 0.7 * 15 * (two - one)


def test_large_forwards_are_bound_by_products_and_whole_tiles() -> None:
    num_tokens = 65_536
    fp8 = QWEN3_30B_A3B.quantized("fp8")
    took = experts_s(fp8, H200.limits, BFLOAT16_EXPERTS, num_tokens)
    products = expert_flops(fp8, num_tokens) / (H200.limits.matmul_rate * BFLOAT16_EXPERTS.product_share)
    # An expert has 4,096 rows.
    assert took == pytest.approx(products * (1 + BFLOAT16_EXPERTS.num_padded / 4096), rel=0.01)
    assert experts_s(LLAMA_8B, H200.limits, BFLOAT16_EXPERTS, num_tokens) == 0


def test_sparse_layers_add_overhead() -> None:
    assert QWEN3_30B_A3B.experts is not None
    some_dense = replace(QWEN3_30B_A3B, experts=replace(QWEN3_30B_A3B.experts, dense_layers=(0, 1, 2, 3)))
    slow, fast = Worker(QWEN3_30B_A3B, H200), Worker(some_dense, H200)
    # A dense layer is as large as the 8 experts of a token.
    overhead = 4 * BFLOAT16_EXPERTS.layer_s
    assert slow.decode_step(1, 1) - fast.decode_step(1, 1) == pytest.approx(overhead, rel=0.05)
    assert slow.prefill(1, 16) > fast.prefill(1, 16) + overhead


def test_a_prefill_holds_the_activations_of_all_pairs() -> None:
    worker = Worker(QWEN3_30B_A3B, H200, chunk_size=8192)
    assert worker.memory("prefill").forward == 2 * 8192 * 8 * (768 + 2048)
    assert Worker(QWEN3_30B_A3B, H200, chunk_size=512).pool_tokens("prefill", 1) >= worker.pool_tokens("prefill", 1)
    with pytest.raises(ValueError, match="a larger GPU or a smaller model"):
        Worker(MIXTRAL_8X7B, GPUS["h100"]).pool_tokens("decode", 4096)
    assert Worker(MIXTRAL_8X7B.quantized("fp8"), GPUS["h100"]).pool_tokens("decode", 4096) > 100_000


def test_prompts_beside_a_step_share_its_experts() -> None:
    worker = Worker(QWEN3_30B_A3B, H200)
    apart = worker.decode_step(64, 1024) + worker.chunk(512, 0)
    assert worker.decode_step(64, 1024) < worker.mixed_step(64, 1024, 512, 0) < 0.8 * apart


def test_ranks_share_weights_and_heads_and_add_sums() -> None:
    """Nothing of this is measured yet."""
    workers = {degree: Worker(LLAMA_8B, H200.joined(degree), degree=degree) for degree in (1, 2, 4)}
    steps = [worker.decode_step(128, 1152) for worker in workers.values()]
    prompts = [worker.prefill(1, 8192) for worker in workers.values()]
    for times in (steps, prompts):
        assert times[0] > times[1] > times[2] > times[0] / 4
    pools = {degree: worker.pool_tokens("decode", 2048) for degree, worker in workers.items()}
    assert pools[2] > 2 * pools[1] and pools[4] > 2 * pools[2]
    with pytest.raises(ValueError, match="3 ranks cannot share the model's query heads, 32"):
        Worker(LLAMA_8B, H200.joined(3), degree=3)


def test_slots_of_adapters_take_room_from_the_pool() -> None:
    slots = Worker(LLAMA_8B, H200, max_loras=64)
    # Rank 16 of all projections of an 8B model is 42 million numbers.
    assert slots.slot_bytes == 64 * 16 * 2 * 32 * (3 * 4096 + 6144 + 8192 + 2 * 4096 + 3 * 14_336 + 4096)
    fewer = Worker(LLAMA_8B, H200).pool_tokens("decode", 1) - slots.pool_tokens("decode", 1)
    assert fewer * 128 * 1024 == pytest.approx(slots.slot_bytes, rel=0.01)
    assert Worker(LLAMA_8B, H200.joined(2), degree=2, max_loras=64).slot_bytes < 0.7 * slots.slot_bytes


def test_drafts_are_rows_that_read_no_more_weights() -> None:
    plain, drafting = Worker(LLAMA_8B, H200), Worker(LLAMA_8B, H200, num_drafts=3)
    assert plain.decode_step(4, 2048) < drafting.decode_step(4, 2048) < 1.1 * plain.decode_step(4, 2048)
    # Attention reads the KV of a sequence once.
    assert plain.decode_step(64, 2048) < drafting.decode_step(64, 2048) < plain.decode_step(256, 2048)


def test_a_step_of_many_rows_has_fewer_drafts_or_none() -> None:
    plain, drafting = Worker(LLAMA_8B, H200), Worker(LLAMA_8B, H200, num_drafts=3)
    assert [drafting.num_rows(size) for size in (1, 64, 128, 255, 256, 300)] == [4, 256, 256, 256, 256, 300]
    assert drafting.num_drafts_of(64) == 3 and drafting.num_drafts_of(128) == 1 and drafting.num_drafts_of(256) == 0
    assert drafting.decode_step(256, 2048) == plain.decode_step(256, 2048)
    # The drafter still computes the rows, so that its pages stay right.
    drafter = DrafterConfig("draft", Path(), QWEN_0_6B, QWEN_0_6B.num_layers)
    with_drafter = replace(drafting, drafter=drafter)
    assert with_drafter.num_passes(64) == 4 and with_drafter.num_passes(256) == 1 and drafting.num_passes(64) == 0


def test_work_counts_drafts_and_the_drafter() -> None:
    plain, kv_len = Worker(LLAMA_8B, H200), 1024
    alone, drafted = decode_work(plain, 8, kv_len), decode_work(replace(plain, num_drafts=3), 8, kv_len)
    # Drafts are rows of the same weights and contexts.
    assert drafted.num_bytes == alone.num_bytes and drafted.flops == 4 * alone.flops
    assert decode_work(replace(plain, num_drafts=3), 256, kv_len) == decode_work(plain, 256, kv_len)
    small = DrafterConfig("draft", Path(), QWEN_0_6B, QWEN_0_6B.num_layers)
    by_model = decode_work(replace(plain, num_drafts=3, drafter=small), 8, kv_len)
    of_pass = read_weight_bytes(QWEN_0_6B, 8) + 8 * kv_len * kv_bytes_per_token(QWEN_0_6B)
    assert by_model.num_bytes - drafted.num_bytes == 4 * of_pass
    assert by_model.floor_s - drafted.floor_s == pytest.approx(4 * of_pass / H200.limits.copy_bandwidth)
    # Three passes of 8 rows, and one of 32.
    assert by_model.flops - drafted.flops == 3 * decode_flops(QWEN_0_6B, 8) + decode_flops(QWEN_0_6B, 32)
    of_prompt = prefill_work(replace(plain, drafter=small), 4096, 1024)
    assert of_prompt.num_bytes - prefill_work(plain, 4096, 1024).num_bytes == read_weight_bytes(QWEN_0_6B, 4096)
    # No row of a prompt drafts.
    logits = 2 * QWEN_0_6B.vocab_size * QWEN_0_6B.hidden_size
    more = of_prompt.flops - prefill_work(plain, 4096, 1024).flops
    assert more == prefill_flops(QWEN_0_6B, 1, 4096, 1024) - logits


def test_a_layer_behind_the_last_one_reads_few_experts_and_the_output_matrix() -> None:
    mtp = DrafterConfig("mtp", Path(), DEEPSEEK_V3, 1, state_size=DEEPSEEK_V3.hidden_size)
    output_matrix = 2 * DEEPSEEK_V3.vocab_size * DEEPSEEK_V3.hidden_size
    one, many = drafter_weight_bytes(mtp, 1), drafter_weight_bytes(mtp, 10_000)
    assert output_matrix < one < 0.25 * many and many == pytest.approx(mtp.weight_bytes + output_matrix, rel=0.01)
    # A token chooses 8 of 256 experts.
    layer = drafter_flops(mtp, 1, 0) / 2
    assert layer == pytest.approx((one - output_matrix) / (1 if DEEPSEEK_V3.quantization else 2), rel=0.02)
    assert drafter_flops(mtp, 1, 1) - drafter_flops(mtp, 1, 0) == output_matrix


def test_a_model_that_drafts_takes_memory_and_time() -> None:
    plain = Worker(LLAMA_8B, H200, num_drafts=3)
    small = DrafterConfig("draft", Path(), QWEN_0_6B, QWEN_0_6B.num_layers)
    drafting = replace(plain, drafter=small)
    taken = drafting.memory("decode").weights - plain.memory("decode").weights
    assert taken == small.weight_bytes == pytest.approx(1.5e9, rel=0.1)
    # Its 28 layers are nearly as large in the pages as the model's 32.
    assert drafting.page_layout().page_bytes == pytest.approx((1 + 28 / 32) * plain.page_layout().page_bytes, rel=0.01)
    assert drafting.transfer(1000) == pytest.approx((1 + 28 / 32) * plain.transfer(1000), rel=0.01)
    assert drafting.weight_bytes - plain.weight_bytes == small.weight_bytes
    # Three passes make drafts, and one computes all rows.
    of_pass = (drafting.decode_step(8, 1024) - plain.decode_step(8, 1024)) / 4
    assert small.weight_bytes / H200.limits.copy_bandwidth < of_pass < 0.002
    assert 1.05 * plain.prefill(1, 8192) < drafting.prefill(1, 8192) < 1.2 * plain.prefill(1, 8192)
    with pytest.raises(ValueError, match="a model that drafts is for workers of one rank, not 2"):
        replace(drafting, degree=2)
