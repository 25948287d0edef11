"""Settings of mixtures of experts that cannot run here: each refusal names the key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.gguf.convert import convert_gguf
from tests.fakes.gguf_files import write_model
from tests.unit.engine.models.test_decoder import Checkpoint
from tests.unit.engine.weights.gguf.conftest import Refusal

SUPPORTED = "supported: llama, olmoe, qwen2, qwen2moe, qwen3, qwen3moe"
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("olmoe", {"general.architecture": "dbrx"}, f"architecture 'dbrx' is not supported in GGUF; {SUPPORTED}"),
    (
        "qwen2",
        {".expert_count": 8, ".expert_used_count": 2},
        "qwen2.expert_count = 8 is not supported: qwen2 has no experts",
    ),
    (
        "qwen3-moe",
        {".expert_count": 0},
        "qwen3moe.expert_count = 0 is not supported: qwen3moe is a mixture of experts",
    ),
    (
        "qwen3-moe",
        {".expert_count": None},
        "qwen3moe.expert_count = 0 is not supported: qwen3moe is a mixture of experts",
    ),
    ("olmoe", {".expert_count": [8, 8]}, "olmoe.expert_count must be an integer of at least 0, below 2147483648, got "),
    ("olmoe", {".expert_used_count": 9}, "olmoe.expert_used_count 9 is more than olmoe.expert_count 8"),
    ("mixtral", {".expert_used_count": None}, "llama.expert_used_count must be a positive integer below"),
    ("mixtral", {".expert_weights_norm": False}, "llama.expert_weights_norm = False is not supported"),
    ("qwen2-moe", {".expert_weights_norm": 1}, "qwen2moe.expert_weights_norm must be true or false, got 1"),
    ("qwen3-moe", {".expert_gating_func": 2}, "qwen3moe.expert_gating_func = 2 is not supported"),
    ("qwen3-moe", {".expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale = 2.5 is not supported"),
    ("qwen3-moe", {".expert_group_count": 4}, "qwen3moe.expert_group_count = 4 is not supported"),
    ("olmoe", {".attention.clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv = 8.0 is not supported"),
    ("qwen2", {".attention.causal": False}, "qwen2.attention.causal = False is not supported"),
    ("qwen2", {".rope.scaling.type": "yarn"}, "qwen2.rope.scaling.type = 'yarn' is not supported"),
    (
        "mixtral",
        {"split.count": 3},
        "split.count = 3: a model split into several files is not supported; merge them",
    ),
]


@pytest.mark.parametrize(("model", "metadata", "message"), REFUSALS, ids=[message[:40] for *_, message in REFUSALS])
def test_unsupported_settings_are_refused(refusal: Refusal, model: str, metadata: dict[str, Any], message: str) -> None:
    assert refusal(model, metadata).startswith(message)


def test_neutral_settings_change_nothing(checkpoints: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    neutral = {
        ".expert_gating_func": 1,
        ".expert_weights_scale": 1.0,
        ".expert_group_count": 1,
        ".expert_weights_norm": True,
        ".attention.causal": True,
        "split.count": 1,
    }
    original = checkpoints["qwen3-moe"].path
    convert_gguf(write_model(tmp_path / "model.gguf", original, neutral), tmp_path / "out")
    assert ModelConfig.from_dir(tmp_path / "out") == ModelConfig.from_dir(original)


@pytest.mark.parametrize(("normalizes", "expected"), [(None, True), (True, True), (False, False)])
def test_the_file_decides_on_normalization(
    checkpoints: Mapping[str, Checkpoint], tmp_path: Path, normalizes: bool | None, expected: bool
) -> None:
    source = write_model(tmp_path / "model.gguf", checkpoints["qwen3-moe"].path, {".expert_weights_norm": normalizes})
    convert_gguf(source, tmp_path / "out")
    experts = ModelConfig.from_dir(tmp_path / "out").experts
    assert experts is not None and experts.routing.normalize is expected


def test_sizes_that_early_files_lack(refusal: Refusal) -> None:
    # An expert has its share of the dense size, 112 of 2 chosen experts; a shared expert has all of it.
    message = refusal("qwen2-moe", {".expert_feed_forward_length": None})
    assert message == "tensor blk.0.ffn_gate_exps.weight has shape [64, 48, 8], but the metadata says [64, 56, 8]"
    message = refusal("qwen2-moe", {".expert_shared_feed_forward_length": None})
    assert message == "tensor blk.0.ffn_gate_shexp.weight has shape [64, 80], but the metadata says [64, 112]"
