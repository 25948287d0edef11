"""PEFT directories: what is accepted, what is refused and how, and their identity."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.adapters.base import AdapterError
from tandem.engine.adapters.modules import adapted_modules
from tandem.engine.adapters.peft import TENSOR_FILE, read_adapter, read_info
from tandem.engine.adapters.peft_config import CONFIG_FILE
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.latent import LatentConfig
from tests.fakes.adapters import ALL_TARGETS, write_adapter
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA

MAX_RANK = 16
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return ModelConfig.from_dir(tmp_path)


@pytest.fixture
def path(tmp_path: Path, model: ModelConfig) -> Path:
    return write_adapter(tmp_path / "adapter", model, 8)


def set_config(path: Path, **settings: Any) -> None:
    file = path / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / TENSOR_FILE)
    change(tensors)
    save_file(tensors, path / TENSOR_FILE)


def reverse(path: Path) -> None:
    """Writes the tensors in the opposite order."""
    tensors = load_file(path / TENSOR_FILE)
    header, data = {}, b""
    for name in reversed(tensors):
        numbers = tensors[name].numpy().tobytes()
        header[name] = {
            "dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [len(data), len(data) + len(numbers)]
        }  # fmt: skip
        data += numbers
    described = json.dumps(header).encode()
    (path / TENSOR_FILE).write_bytes(len(described).to_bytes(8, "little") + described + data)


def test_info_describes_the_adapter(path: Path, model: ModelConfig) -> None:
    info = read_info(path, model, MAX_RANK)
    assert (info.path, info.rank, info.base_model) == (str(path), 8, "a/base")
    assert info.targets == tuple(sorted(ALL_TARGETS))
    assert info.num_bytes == sum(4 * 8 * sum(shape) for shape in adapted_modules(model).values())
    assert len(info.content_hash) == 32


def test_scales_follow_the_configuration(tmp_path: Path, model: ModelConfig) -> None:
    settings = {"lora_alpha": 12, "use_rslora": True, "alpha_pattern": {"layers.1.self_attn.q_proj": 6}}
    path = write_adapter(tmp_path / "one", model, 4, ("q_proj", "v_proj"), settings=settings, ranks={"v_proj": 9})
    modules = read_adapter(path, model, MAX_RANK).modules
    scales = {name.removeprefix("model.layers.").replace("self_attn.", ""): m.scale for name, m in modules.items()}
    assert scales == {"0.q_proj": 6.0, "1.q_proj": 3.0, "0.v_proj": 4.0, "1.v_proj": 4.0}
    assert read_info(path, model, MAX_RANK).rank == 9


def test_hash_is_of_what_an_adapter_computes(tmp_path: Path, path: Path, model: ModelConfig) -> None:
    def hash_after(change: Callable[[Path], object]) -> str:
        copied = tmp_path / "copied"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(path, copied)
        change(copied)
        return read_info(copied, model, MAX_RANK).content_hash

    same = read_info(path, model, MAX_RANK).content_hash
    assert hash_after(lambda copied: None) == same
    assert hash_after(lambda copied: set_config(copied, lora_dropout=0.3, base_model_name_or_path="b")) == same
    assert hash_after(reverse) == same
    others = {
        hash_after(lambda copied: set_config(copied, lora_alpha=17)),
        hash_after(lambda copied: set_config(copied, use_rslora=True)),
        hash_after(lambda copied: change_tensors(copied, lambda t: t[f"{Q}.lora_B.weight"][0, 0].add_(1e-3))),
        same,
    }
    assert len(others) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, not 'IA3'"),
        ({"use_dora": True}, "'use_dora' is True: DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is .*: whole modules trained beside the adapter"),
        ({"trainable_token_indices": [3]}, "trained embeddings are not supported"),
        ({"bias": "all"}, "bias must be none, not 'all'"),
        ({"lora_bias": True}, "biases of an adapter are not supported"),
        ({"layer_replication": [[0, 1]]}, "'layer_replication' is .*: this setting is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base's weights: save the adapter with"),
        ({"rank_pattern": {"(a+)+$": 4}}, "write module names instead of regular expressions"),
        ({"r": 32, "lora_alpha": True}, "lora_alpha must be a number, not True"),
        ({"r": 0}, "r must be a whole number of at least 1, not 0"),
        ({"r": 17}, "module model.layers.0.mlp.down_proj has rank 17, more than --max-lora-rank 16"),
        ({"r": 4}, "lora_A of .* has shape .8, 32., but this model needs .4, 32.: the adapter belongs to another base"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head', which belongs to an embedding or the output matrix"),
        ({"target_modules": ["fc1"]}, "'fc1', which belongs to no module of this model that adapters can change: down"),
        ({"target_modules": 3}, "target_modules must be names or a pattern, not 3"),
    ],
)
def test_unsupported_setting_is_refused(path: Path, model: ModelConfig, settings: Any, message: str) -> None:
    set_config(path, **settings)
    with pytest.raises(AdapterError, match=message) as raised:
        read_info(path, model, MAX_RANK)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.lora_A.weight"), "module model.layers.0.self_attn.q_proj lacks lora_A"),
        (
            lambda t: [t.pop(name) for name in [*t] if "layers.1.self_attn.q_proj" in name],
            "'q_proj', but model.layers.1.self_attn.q_proj has no tensors",
        ),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(2)}), "belongs to DoRA, which is not supported"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2)}),
            "belongs to an embedding or the output matrix",
        ),
        (lambda t: t.update({f"{Q}.lora_B.bias": torch.ones(2)}), "is a bias, which adapters cannot have here"),
        (
            lambda t: t.update({Q.replace(".0.", ".9.") + ".lora_A.weight": torch.ones(2)}),
            "layers.9.self_attn.q_proj.lora_A.weight' is of a module that this model does not have: the adapter",
        ),
        (
            lambda t: t.update({Q.replace("q_proj", "z_proj") + ".lora_A.weight": torch.ones(2)}),
            "self_attn.z_proj.lora_A.weight' belongs to no module of this model that adapters can change: down_proj",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 16).double()}),
            "dtype F64, not one of F32, BF16, F16",
        ),
        (lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(24, 8)}), r"shape \(24, 8\), but this model needs"),
        (dict.clear, "it has no tensors"),
    ],
)
def test_unusable_tensor_is_refused(path: Path, model: ModelConfig, change: Any, message: str) -> None:
    change_tensors(path, change)
    with pytest.raises(AdapterError, match=message) as raised:
        read_info(path, model, MAX_RANK)
    assert str(path / TENSOR_FILE) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: (p / TENSOR_FILE).rename(p / "adapter_model.bin"), "is a pickle file, which may run code"),
        (lambda p: (p / TENSOR_FILE).unlink(), "has no adapter_model.safetensors"),
        (lambda p: (p / CONFIG_FILE).unlink(), "cannot read .*adapter_config.json: No such file"),
        (lambda p: (p / CONFIG_FILE).write_text("[1"), "adapter_config.json is not valid JSON"),
        (lambda p: (p / CONFIG_FILE).write_text("[" * 100_000), "adapter_config.json is not valid JSON"),
        (lambda p: (p / CONFIG_FILE).write_text("[]"), r"it must be an object, not \[\]"),
        (lambda p: (p / TENSOR_FILE).write_bytes(b"\x80\x04pickle"), "is not a valid safetensors file"),
        (
            lambda p: (p / TENSOR_FILE).write_bytes((p / TENSOR_FILE).read_bytes()[:-8]),
            "ends 8 bytes beyond the end of the file",
        ),
    ],
)
def test_unusable_file_is_refused(path: Path, model: ModelConfig, break_it: Any, message: str) -> None:
    break_it(path)
    with pytest.raises(AdapterError, match=message) as raised:
        read_info(path, model, MAX_RANK)
    assert "\n" not in str(raised.value)


def test_experts_take_adapters_of_attention_alone(tmp_path: Path) -> None:
    raw = TINY_LLAMA | TINY_EXPERTS | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = ModelConfig.from_dir(tmp_path)
    path = write_adapter(tmp_path / "one", model, 4, ("q_proj", "o_proj"))
    assert read_info(path, model, MAX_RANK).targets == ("o_proj", "q_proj")
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight"
    change_tensors(path, lambda tensors: tensors.update({name: torch.ones(4, 16)}))
    with pytest.raises(AdapterError, match=r"belongs to experts, .* only attention's projections"):
        read_info(path, model, MAX_RANK)


def test_latent_attention_takes_no_adapters(path: Path, model: ModelConfig) -> None:
    latent = LatentConfig(q_rank=0, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=8)
    with pytest.raises(AdapterError, match="not supported for LlamaForCausalLM, because its attention is over latents"):
        read_info(path, replace(model, latent=latent, head_dim=8), MAX_RANK)
