import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tandem.adapters import MAX_LOADED
from tandem.engine.adapters.modules import slot_numbers
from tandem.engine.config import EngineConfig
from tandem.engine.kvcache.sizing import GIB
from tandem.engine.layers.ops import TorchOps
from tandem.engine.memory_needs import check_memory, num_pool_bytes, num_weight_bytes
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.families.table import ARCHITECTURES
from tandem.engine.page_layout import page_layout_of
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA
from tests.fakes.model_shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_30B_A3B

# Matrices large enough to outweigh norms and biases, and of the experts to outweigh all else.
SIZES = TINY_LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 512}
EXPERTS = TINY_EXPERTS | {
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 256),
}


PUBLISHED = (QWEN3_30B_A3B, MIXTRAL_8X7B, DEEPSEEK_V2_LITE, DEEPSEEK_V3)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"vocab_size": 5000}))
    return ModelConfig.from_dir(tmp_path)


class Allocations(TorchFunctionMode):
    """Counts the bytes of a model's tensors. Weights that are copies have no names."""

    num_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self.num_bytes += made.nbytes
        return made


def allocated_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of a model's weights. The model keeps its FP8."""
    with Allocations() as allocations:
        DecoderModel(model, dtype, torch.device("meta"), TorchOps())
    return allocations.num_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_of_the_model(architecture: str, tied: bool, tmp_path: Path) -> None:
    config = SIZES | {"architectures": [architecture], "tie_word_embeddings": tied}
    if ARCHITECTURES[architecture].experts is not None:
        config |= EXPERTS
    if ARCHITECTURES[architecture].latent is not None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig.from_dir(tmp_path)
    engine = EngineConfig(model_dir="m", num_pages=4)
    num_bytes = num_weight_bytes(engine, model)
    assert num_bytes == pytest.approx(allocated_bytes(model, torch.float32), rel=0.01)
    halves = replace(engine, dtype="bfloat16")
    assert 2 * num_weight_bytes(halves, model) == num_bytes
    fp8 = model.quantized("fp8")
    # FP8 weights become plain ones on CPUs.
    assert num_weight_bytes(engine, fp8) == num_bytes
    on_gpu = replace(halves, device="cuda")
    # Scales are a hundredth of matrices of so few columns.
    assert num_weight_bytes(on_gpu, fp8) == pytest.approx(allocated_bytes(fp8, torch.bfloat16), rel=0.02)
    assert num_weight_bytes(on_gpu, fp8) < num_weight_bytes(on_gpu, model)


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.architecture)
def test_published_models_have_the_memory_of_their_weights(shape: ModelConfig) -> None:
    on_gpu = EngineConfig(model_dir="m", device="cuda", dtype="bfloat16", num_pages=4)
    for model in (shape, shape.quantized("fp8")):
        assert num_weight_bytes(on_gpu, model) == pytest.approx(allocated_bytes(model, torch.bfloat16), rel=0.005)


def test_the_message_says_what_to_change(model: ModelConfig) -> None:
    engine = EngineConfig(model_dir="m", num_pages=100)
    layout = page_layout_of(model, engine.page_size, engine.dtype, engine.kv_cache_dtype)
    weights, pool = num_weight_bytes(engine, model), num_pool_bytes(engine, layout)
    assert pool == 100 * layout.page_bytes
    check_memory(engine, model, layout, 2 * (weights + pool), num_workers=2)
    with pytest.raises(ValueError, match=r"2 pools of 100 pages .* of weights.* use a num_pages of at most 99$"):
        check_memory(engine, model, layout, 2 * (weights + pool) - 1, num_workers=2)
    with pytest.raises(ValueError, match=r"the weights of one worker need .* use a smaller model, or end what else"):
        check_memory(engine, model, layout, weights)
    on_gpu = replace(engine, device="cuda", num_pages=0, max_model_len=64)
    with pytest.raises(ValueError, match=r"MiB of GPU memory are free; use a smaller model, FP8 weights"):
        check_memory(on_gpu, model, layout, 1000)
    check_memory(on_gpu, model, layout, GIB)
    assert num_pool_bytes(on_gpu, layout) == layout.num_pages_for(64) * layout.page_bytes


def test_adapters_in_host_memory_are_counted_on_a_cpu(model: ModelConfig) -> None:
    engine = EngineConfig(model_dir="m", num_pages=100, max_loras=2, lora_host_memory=0.05)
    layout = page_layout_of(model, engine.page_size, engine.dtype, engine.kv_cache_dtype)
    needed = num_weight_bytes(engine, model) + num_pool_bytes(engine, layout)
    kept = int(0.05 * GIB)
    check_memory(engine, model, layout, 2 * (needed + kept), num_workers=2)
    with pytest.raises(ValueError, match=r"adapters .* of 2 workers may take 102 MiB .* a lora_host_memory of at most"):
        check_memory(engine, model, layout, 2 * (needed + kept) - 2, num_workers=2)
    with pytest.raises(ValueError, match=r"use a num_pages of at most 99$"):
        check_memory(engine, model, layout, needed - 1)
    # No more than all adapters that may be loaded.
    most = MAX_LOADED * slot_numbers(model, engine.max_lora_rank) * 4
    check_memory(replace(engine, lora_host_memory=1e6), model, layout, needed + most)
    # Without adapters, and beside a GPU's memory, nothing is kept.
    without = replace(engine, max_loras=0)
    check_memory(without, model, layout, num_weight_bytes(without, model) + num_pool_bytes(without, layout))
    check_memory(replace(engine, device="cuda"), model, layout, needed)


def test_without_num_pages_the_message_names_the_length(model: ModelConfig) -> None:
    engine = EngineConfig(model_dir="m", device="cuda", dtype="bfloat16", num_pages=0, max_model_len=640)
    layout = page_layout_of(model, engine.page_size, engine.dtype, engine.kv_cache_dtype)
    weights = num_weight_bytes(engine, model)
    with pytest.raises(ValueError, match=f"use a max_model_len of at most {3 * layout.page_size}$"):
        check_memory(engine, model, layout, weights + 3 * layout.page_bytes)
    # No page fits.
    with pytest.raises(ValueError, match=r"use a smaller model$"):
        check_memory(engine, model, layout, weights + 1)
