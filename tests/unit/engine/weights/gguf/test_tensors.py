"""Tensors that do not fit their metadata: each refusal names one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.engine.weights.gguf.convert import convert_gguf
from tests.fakes.gguf_files import write_model
from tests.unit.engine.models.test_decoder import Checkpoint
from tests.unit.engine.weights.gguf.conftest import Refusal

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ONES = np.ones(64, np.float32)
MATRIX = np.ones((112, 64), np.float32)
SHARED: dict[str, np.ndarray | None] = {
    f"blk.1.ffn_{part}.weight": None for part in ("gate_inp_shexp", "gate_shexp", "up_shexp", "down_shexp")
}
REFUSALS: list[tuple[str, dict[str, Any], dict[str, np.ndarray | None], str]] = [
    (
        "olmoe",
        {".expert_count": 4},
        {},
        "tensor blk.0.ffn_gate_inp.weight has shape [64, 8], but the metadata says [64, 4]",
    ),
    ("olmoe", {".expert_count": 2**31 - 1}, {}, "tensor blk.0.ffn_gate_inp.weight has shape [64, 8], but the metadata"),
    (
        "qwen3-moe",
        {".expert_feed_forward_length": 32},
        {},
        "tensor blk.0.ffn_gate_exps.weight has shape [64, 48, 8], but the metadata says [64, 32, 8]",
    ),
    (
        "mixtral",
        {},
        {"blk.1.ffn_down_exps.weight": np.ones((7, 64, 112), np.float32)},
        "tensor blk.1.ffn_down_exps.weight has shape [112, 64, 7], but the metadata says [112, 64, 8]",
    ),
    ("olmoe", {}, {"blk.1.ffn_up_exps.weight": None}, "1 tensors are missing, for example blk.1.ffn_up_exps.weight"),
    (
        "mixtral",
        {},
        {"blk.0.ffn_gate_inp.weight": None},
        "1 tensors are missing, for example blk.0.ffn_gate_inp.weight",
    ),
    ("qwen2-moe", {}, SHARED, "4 tensors are missing, for example blk.1.ffn_down_shexp.weight"),
    ("qwen2", {}, {"blk.0.attn_k.bias": None}, "1 tensors are missing, for example blk.0.attn_k.bias"),
    (
        "qwen3-moe",
        {},
        {"blk.1.exp_probs_b.bias": ONES[:8]},
        "1 tensors have no place in Qwen3MoeForCausalLM, for example blk.1.exp_probs_b.bias",
    ),
    # A dense layer among sparse ones.
    (
        "qwen3-moe",
        {},
        {f"blk.1.{name}.weight": None for name in (*EXPERTS, "ffn_gate_inp")} | {"blk.1.ffn_up.weight": MATRIX},
        "4 tensors are missing, for example blk.1.ffn_down_exps.weight",
    ),
    (
        "qwen2",
        {},
        {"rope_freqs.weight": ONES[:8]},
        "1 tensors have no place in Qwen2ForCausalLM, for example rope_freqs.weight",
    ),
    (
        "mixtral",
        {},
        {f"blk.{layer}.{name}.weight": None for layer in (0, 1) for name in EXPERTS}
        | {f"blk.0.ffn_gate.{expert}.weight": MATRIX for expert in range(8)},
        "tensor blk.0.ffn_gate.0.weight holds one expert, as in files before April 2024; supported: all experts of a "
        "layer in one ffn_gate_exps.weight. Convert the model again",
    ),
]


@pytest.mark.parametrize(("model", "metadata", "tensors", "message"), REFUSALS, ids=[m[:50] for *_, m in REFUSALS])
def test_tensors_that_do_not_fit_are_refused(
    refusal: Refusal, model: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray | None], message: str
) -> None:
    assert refusal(model, metadata, tensors).startswith(message)


def test_trailing_dimensions_of_one_may_be_there(checkpoints: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    row = np.arange(64, dtype=np.float32)[None]
    source = write_model(
        tmp_path / "model.gguf", checkpoints["qwen2-moe"].path, tensors={"blk.1.ffn_gate_inp_shexp.weight": row}
    )
    convert_gguf(source, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.shared_expert_gate.weight"]
    np.testing.assert_array_equal(found, row)


def test_a_stack_of_one_expert(checkpoints: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    shapes = {"gate_exps": (112, 64), "up_exps": (112, 64), "down_exps": (64, 112), "gate_inp": (64,)}
    numbers = np.random.default_rng(0)
    tensors = {
        f"blk.{layer}.ffn_{name}.weight": numbers.standard_normal(shape, dtype=np.float32)
        for layer in (0, 1)
        for name, shape in shapes.items()
    }
    metadata = {".expert_count": 1, ".expert_used_count": 1}
    convert_gguf(write_model(tmp_path / "model.gguf", checkpoints["mixtral"].path, metadata, tensors), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    mlp = "model.layers.1.block_sparse_moe"
    np.testing.assert_array_equal(found[f"{mlp}.experts.0.w2.weight"], tensors["blk.1.ffn_down_exps.weight"])
    np.testing.assert_array_equal(found[f"{mlp}.gate.weight"], tensors["blk.1.ffn_gate_inp.weight"][None])
