"""Fingerprints distinguish any two sets of loaded weights, and nothing else."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights import fingerprint
from tandem.engine.weights.fingerprint import model_fingerprint
from tandem.engine.weights.loader import dummy_weights
from tandem.messages import PageFormat
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA

CPU = torch.device("cpu")


def shapes(model: Model) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(weight.shape), weight.dtype) for name, weight in model.named_parameters()]


def load(model_dir: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    model = build_model(ModelConfig.from_dir(Path(model_dir)), dtype, CPU)
    model.load_weights(dummy_weights(shapes(model), seed))
    return model


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int32 if weight.itemsize == 4 else torch.int16)


def test_equal_weights_have_one_fingerprint(model_dir: str) -> None:
    first = model_fingerprint(load(model_dir))
    assert first == model_fingerprint(load(model_dir)) and len(first) == 32
    assert first != model_fingerprint(load(model_dir, seed=1))
    assert first != model_fingerprint(load(model_dir, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bit_of_any_tensor_counts(model_dir: str, dtype: torch.dtype) -> None:
    model = load(model_dir, dtype)
    seen = {model_fingerprint(model)}
    num_changes = 0
    for _, weight in model.named_parameters():
        # The lowest bit and the sign of the first and the last element.
        for place in (0, -1):
            for bit in (0, 8 * weight.itemsize - 1):
                element = bits(weight)[(place,) * weight.dim()]
                element ^= -(2**bit) if bit == 8 * weight.itemsize - 1 else 1
                seen.add(model_fingerprint(model))
                num_changes += 1
    assert len(seen) == num_changes + 1 > 40


@pytest.mark.parametrize(
    "change",
    {
        "two rows change places": lambda w: w.copy_(w[[1, 0, *range(2, len(w))]]),
        "two columns change places": lambda w: w.copy_(w[:, [1, 0, *range(2, w.shape[1])]]),
        "two signs change": lambda w: w[0, :4:2].neg_(),
        "two rows change signs": lambda w: w[:2].neg_(),
        "all signs change": lambda w: w.neg_(),
        "it is twice as large": lambda w: w.mul_(2),
        "it is zero": lambda w: w.zero_(),
    }.values(),
)
def test_changes_with_an_equal_sum_count(model_dir: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = load(model_dir)
    first = model_fingerprint(model)
    with torch.inference_mode():
        change(dict(model.named_parameters())["model.layers.0.mlp.down_proj.weight"])
    assert model_fingerprint(model) != first


def test_one_thread_computes_the_sums(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row_sums, num_threads, seen = fingerprint._row_sums, torch.get_num_threads(), set[int]()

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return row_sums(tensor)

    monkeypatch.setattr(fingerprint, "_row_sums", watched)
    model = load(model_dir)
    torch.set_num_threads(2)
    try:
        model_fingerprint(model)
        assert seen == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)


def test_zeros_of_other_shapes_count() -> None:
    assert len(fingerprint._row_sums(torch.zeros(3, 5))) == 3 and len(fingerprint._row_sums(torch.zeros(15))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (3, 5), (40, 33), (64, 1000), (4, 3, 5)])
def test_neither_memory_nor_pieces_matter(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    sums = fingerprint._row_sums(weight)
    # In column order, as the engine keeps matrices on a CPU.
    assert torch.equal(fingerprint._row_sums(weight.transpose(0, -1).contiguous().transpose(0, -1)), sums)
    for num_elements in (1, 64, 2000):
        monkeypatch.setattr(fingerprint, "_CHUNK_ELEMENTS", {"cpu": num_elements})
        assert torch.equal(fingerprint._row_sums(weight), sums)


def test_only_effective_configuration_counts(tmp_path: Path, model_dir: str) -> None:
    config = Path(model_dir) / "config.json"
    first, text = model_fingerprint(load(model_dir)), config.read_text()
    config.write_text(text.replace("{", '{"rope_theta": 12345.0, ', 1))
    assert model_fingerprint(load(model_dir)) != first
    config.write_text(text.replace("{", '{"_name_or_path": "elsewhere", ', 1))
    assert model_fingerprint(load(model_dir)) == first


def test_files_replaced_between_two_loads_are_noticed(model_dir: str) -> None:
    weights = Path(model_dir) / "model.safetensors"
    model = load(model_dir)
    save_file({name: weight.contiguous() for name, weight in model.named_parameters()}, weights)

    def page_format() -> PageFormat:
        engine = build_engine(EngineConfig(model_dir, num_pages=4), f"fingerprint-{os.getpid()}", list[str]().append)
        engine.pool.close()
        return PageFormat(engine.model_fingerprint, engine.pool.layout.page_bytes, engine.pool.layout.tag)

    before, stat = page_format(), weights.stat()
    assert before == page_format() and before.model_fingerprint == model_fingerprint(model)
    # This change shows neither in a sample nor in size or date.
    tensors = load_file(weights)
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] += 1e-3
    save_file(tensors, weights)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = page_format()
    assert weights.stat().st_size == stat.st_size
    assert before.mismatch(before, "a", "b") == ""
    assert "models differ: a has loaded" in after.mismatch(before, "a", "b")


def test_dense_models_are_described_as_by_versions_without_experts(model_dir: str) -> None:
    """Such versions link with this one during a rolling upgrade of protocol version 7."""
    assert fingerprint._described(ModelConfig.from_dir(Path(model_dir))).keys() == {
        "architecture",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "mlp_bias",
        "num_kv_heads",
        "num_layers",
        "num_q_heads",
        "o_bias",
        "qk_norm",
        "qkv_bias",
        "quantization",
        "rms_norm_eps",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    }


KEYS = ("num_experts", "num_local_experts")


def save_experts(directory: Path, **changes: Any) -> str:
    config = {**TINY_LLAMA, **TINY_EXPERTS, "architectures": ["Qwen2MoeForCausalLM"], "num_key_value_heads": 2}
    (directory / "config.json").write_text(json.dumps(config | changes))
    return str(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bit_of_any_expert_counts(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load(save_experts(tmp_path), dtype)
    seen, num_changes = {model_fingerprint(model)}, 0
    for name, weight in model.named_parameters():
        if "mlp" in name:
            bits(weight)[(-1,) * weight.dim()] ^= 1
            seen.add(model_fingerprint(model))
            num_changes += 1
    # 4 experts, a shared one, its gate and the router, in 2 layers.
    assert len(seen) == num_changes + 1 == 2 * (5 * 3 + 2) + 1


def test_experts_that_change_places_count(tmp_path: Path) -> None:
    model = load(save_experts(tmp_path))
    seen = [model_fingerprint(model)]
    held = dict(model.named_parameters())
    for parts in (("gate_proj", "up_proj", "down_proj"), ("down_proj",)):
        for part in parts:
            first, last = (held[f"model.layers.1.mlp.experts.{expert}.{part}.weight"] for expert in (0, 3))
            first_copy = first.clone()
            first.copy_(last)
            last.copy_(first_copy)
        seen.append(model_fingerprint(model))
    assert len(set(seen)) == 3


def test_routing_counts(tmp_path: Path) -> None:
    changes: tuple[dict[str, Any], ...] = ({}, {"norm_topk_prob": True}, {"num_experts_per_tok": 3})
    found = [model_fingerprint(load(save_experts(tmp_path, **change))) for change in changes]
    assert len(set(found)) == 3


def test_the_name_of_the_number_of_experts_does_not_matter(tmp_path: Path) -> None:
    found = [load(save_experts(tmp_path, **{key: 4, other: None})) for key, other in (KEYS, KEYS[::-1])]
    assert [model.config.experts.count_key for model in found if model.config.experts is not None] == list(KEYS)
    assert model_fingerprint(found[0]) == model_fingerprint(found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 4, 6), (3, 7, 33), (6, 40, 1000), (1, 1, 1)])
def test_the_layout_of_experts_does_not_matter(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    sums = fingerprint._row_sums(experts)
    assert torch.equal(sums, torch.cat([fingerprint._row_sums(expert) for expert in experts]))
    # A CPU keeps each expert's matrix by columns, a GPU by rows.
    by_columns = experts.transpose(1, 2).contiguous().transpose(1, 2)
    for num_elements in (1, 50, 2000, 2**16):
        monkeypatch.setattr(fingerprint, "_CHUNK_ELEMENTS", {"cpu": num_elements})
        assert torch.equal(fingerprint._row_sums(by_columns), sums)
        assert torch.equal(fingerprint._row_sums(experts), sums)


def test_experts_are_summed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of experts would take a kernel each."""
    row_sums, num_calls = fingerprint._row_sums, [0]

    def counted(tensor: torch.Tensor, *columns: Any) -> torch.Tensor:
        num_calls[0] += 1
        return row_sums(tensor, *columns)

    monkeypatch.setattr(fingerprint, "_row_sums", counted)
    calls = []
    for num_experts in (4, 64):
        num_calls[0] = 0
        model_fingerprint(load(save_experts(tmp_path, num_experts=num_experts, num_local_experts=num_experts)))
        calls.append(num_calls[0])
    assert calls[0] == calls[1]
