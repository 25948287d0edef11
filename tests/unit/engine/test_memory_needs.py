import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kvcache.sizing import GIB
from tandem.engine.memory_needs import check_memory, num_pool_bytes, num_weight_bytes
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tests.fakes.model_config import TINY_LLAMA


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"vocab_size": 5000}))
    return ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_the_model(model: ModelConfig, tied: bool) -> None:
    model = replace(model, tie_word_embeddings=tied)
    engine = EngineConfig(model_dir="m", num_pages=4)
    built = build_model(model, torch.float32, torch.device("cpu"))
    num_bytes = sum(tensor.nbytes for _, tensor in built.named_parameters())
    assert num_weight_bytes(engine, model) == pytest.approx(num_bytes, rel=0.01)
    halves = replace(engine, dtype="bfloat16")
    assert 2 * num_weight_bytes(halves, model) == num_weight_bytes(engine, model)
    # FP8 weights become plain ones on CPUs.
    assert num_weight_bytes(engine, model.quantized("fp8")) == num_weight_bytes(engine, model)
    on_gpu = replace(halves, device="cuda")
    assert num_weight_bytes(on_gpu, model.quantized("fp8")) < num_weight_bytes(on_gpu, model)


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


def test_without_num_pages_the_message_names_the_length(model: ModelConfig) -> None:
    engine = EngineConfig(model_dir="m", device="cuda", dtype="bfloat16", num_pages=0, max_model_len=640)
    layout = page_layout_of(model, engine.page_size, engine.dtype, engine.kv_cache_dtype)
    weights = num_weight_bytes(engine, model)
    with pytest.raises(ValueError, match=f"use a max_model_len of at most {3 * layout.page_size}$"):
        check_memory(engine, model, layout, weights + 3 * layout.page_bytes)
    # No page fits.
    with pytest.raises(ValueError, match=r"use a smaller model$"):
        check_memory(engine, model, layout, weights + 1)
