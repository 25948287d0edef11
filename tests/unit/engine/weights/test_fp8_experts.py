"""FP8 weights of mixtures of experts: which modules they cover, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.layers.fp8 import FP8_DTYPE, FP8_MAX, dequantize, quantize_channels
from tandem.engine.models.base import Model
from tandem.engine.weights.fingerprint import model_fingerprint
from tests.fakes.fp8_checkpoints import EXPERTS, make_model, save_fp8
from tests.fakes.fp8_schemes import KINDS
from tests.unit.engine.weights.test_fp8 import difference, load, logits_of, reference_logits, tokens

ATTENTION = {f"self_attn.{part}_proj" for part in "qkvo"}
# Families with latent attention, whose projections to and from the latent of keys and values stay plain.
LATENT = {
    "deepseek_v2": {f"self_attn.{part}_proj" for part in ("q", "o")},
    **{
        name: {f"self_attn.{part}_proj" for part in ("q_a", "q_b", "o")}
        for name in ("deepseek_v3", "deepseek_v32", "glm4_moe_lite")
    },
}
LATENT["deepseek_v32"].add("self_attn.indexer.wq_b")
OF_LATENTS = {name: ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"] for name in LATENT}
OF_LATENTS["deepseek_v32"].append("self_attn.indexer.wk")
DENSE = {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
# Modules of a layer with experts that FP8 applies to.
QUANTIZED = {
    "mixtral": {f"block_sparse_moe.experts.{i}.{part}" for i in range(4) for part in ("w1", "w2", "w3")},
    **{
        family: {f"mlp.experts.{i}.{part}_proj" for i in range(4) for part in ("gate", "up", "down")}
        for family in EXPERTS
        if family != "mixtral"
    },
}
QUANTIZED["qwen2_moe"] |= {f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
SHARING = ("dots1", *LATENT)
for name in SHARING:
    QUANTIZED[name] |= {f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
ROUTERS = {
    "mixtral": "block_sparse_moe.gate.weight",
    **dict.fromkeys(("dots1", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), "mlp.gate.e_score_correction_bias"),
}
UP = "model.layers.1.mlp.experts.2.up_proj"


def fp8_modules(model: Model) -> set[str]:
    return {name.removesuffix(".weight") for name, held in model.named_parameters() if held.dtype is FP8_DTYPE}


def expected_modules(family: str) -> set[str]:
    first = DENSE if family in SHARING else QUANTIZED[family]
    attention = LATENT.get(family, ATTENTION)
    layers = (attention | first, attention | QUANTIZED[family])
    return {f"model.layers.{index}.{name}" for index, names in enumerate(layers) for name in names}


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("family", EXPERTS)
def test_checkpoints_of_experts_keep_their_numbers(tmp_path: Path, family: str) -> None:
    tensors = save_fp8(make_model(family), tmp_path, "channels_dynamic")
    model = load(tmp_path, keeps_fp8=True)
    assert fp8_modules(model) == expected_modules(family) == set(model.projections())
    held = dict(model.named_parameters())
    for module in [f"model.layers.{index}.{name}" for index in range(2) for name in OF_LATENTS.get(family, ())]:
        scale = tensors.pop(f"{module}.weight_scale").float()
        tensors[f"{module}.weight"] = dequantize(tensors[f"{module}.weight"], scale)
    assert held.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(held[name].float(), tensor.float()), name


@pytest.mark.parametrize("family", EXPERTS)
def test_plain_experts_become_fp8_when_they_are_loaded(tmp_path: Path, family: str) -> None:
    reference = make_model(family)
    reference.save_pretrained(tmp_path)
    plain, kept = load(tmp_path), load(tmp_path, "fp8", keeps_fp8=True)
    assert fp8_modules(kept) == expected_modules(family)
    held, rounded = dict(kept.named_parameters()), dict(load(tmp_path, "fp8").named_parameters())
    router = f"model.layers.1.{ROUTERS.get(family, 'mlp.gate.weight')}"
    assert router in held and held[router].dtype is torch.float32
    for name, weight in plain.named_parameters():
        if name.removesuffix(".weight") not in expected_modules(family):
            assert torch.equal(held[name], weight) and torch.equal(rounded[name], weight)
            continue
        numbers, scale = quantize_channels(weight)
        assert torch.equal(held[name].view(torch.uint8), numbers.view(torch.uint8))
        assert torch.equal(held[f"{name}_scale"], scale)
        torch.testing.assert_close(rounded[name], numbers.float() * scale, atol=0.0, rtol=1e-6)
    assert 0.02 < difference(logits_of(kept, tokens()), reference_logits(reference)) < 0.3


def test_static_inputs_of_a_layers_experts_have_the_largest_scale(tmp_path: Path) -> None:
    tensors = save_fp8(make_model("qwen3_moe"), tmp_path, "tensors_static")
    tensors["model.layers.0.mlp.experts.3.up_proj.input_scale"] = torch.tensor([7.0])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    model: Any = load(tmp_path, keeps_fp8=True)
    first, second = (layer.mlp._experts for layer in model._layers)
    assert first.gate_up.input_scale.tolist() == [7.0]
    largest = max(float(scale) for name, scale in tensors.items() if "1.mlp" in name and "down_proj.input_s" in name)
    assert second.down.input_scale.tolist() == [pytest.approx(largest)]


def test_an_fp8_router_is_dequantized(tmp_path: Path) -> None:
    reference = make_model("qwen3_moe")
    gate = "model.layers.0.mlp.gate.weight"
    with torch.no_grad():
        weight = reference.get_parameter(gate)
        scale = weight.abs().max() / FP8_MAX
        numbers = (weight / scale).to(FP8_DTYPE)
        weight.copy_(numbers.float() * scale)
    tensors = save_fp8(reference, tmp_path, "fp8_dynamic")
    tensors |= {gate: numbers, gate.replace("weight", "weight_scale"): scale}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for keeps_fp8 in (False, True):
        held = dict(load(tmp_path, keeps_fp8=keeps_fp8).named_parameters())
        torch.testing.assert_close(held[gate], weight.detach())


def test_all_experts_of_a_layer_are_ignored_or_none(tmp_path: Path) -> None:
    ignored = tuple(f"model.layers.0.{name}" for name in QUANTIZED["qwen3_moe"])
    save_fp8(make_model("qwen3_moe"), tmp_path, "channels_dynamic", ignored)
    assert fp8_modules(load(tmp_path, keeps_fp8=True)) == expected_modules("qwen3_moe") - set(ignored)
    save_fp8(make_model("qwen3_moe"), tmp_path, "channels_dynamic", (UP,))
    with pytest.raises(ValueError, match=f"ignores {UP}, but not .*: ignore all or none .* of a layer's experts$"):
        load(tmp_path, keeps_fp8=True)
    load(tmp_path)


@pytest.mark.parametrize("keeps_fp8", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        ("channels_dynamic", f"{UP}.weight_scale", None, f"tensor {UP}.weight_scale is missing"),
        ("tensors_static", f"{UP}.input_scale", None, f"tensor {UP}.input_scale is missing"),
        ("fp8_blocks", f"{UP}.weight_scale_inv", None, f"tensor {UP}.weight_scale_inv is missing"),
        (
            "fp8_blocks",
            f"{UP}.weight_scale_inv",
            torch.ones(2, 2),
            r"weight_scale_inv has shape \(2, 2\), not \(1, 2\)",
        ),
        ("channels_dynamic", f"{UP}.weight", torch.zeros(128, 256), f"{UP}.weight has dtype torch.float32, not"),
        ("fp8_static", f"{UP}.weight_scale", torch.tensor(float("nan")), f"{UP}.weight_scale has a scale that is not"),
        ("channels_dynamic", "model.layers.0.mlp.experts.4.up_proj.weight", torch.zeros(128, 256), "is unexpected"),
    ],
)
def test_refuses_malformed_experts(
    tmp_path: Path, kind: str, name: str, tensor: torch.Tensor | None, message: str, keeps_fp8: bool
) -> None:
    tensors = save_fp8(make_model("qwen3_moe"), tmp_path, kind)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path, keeps_fp8=keeps_fp8)


@pytest.mark.parametrize("part", ["weight", "weight_scale", "input_scale"])
def test_fingerprints_cover_each_experts_numbers_and_scales(tmp_path: Path, part: str) -> None:
    save_fp8(make_model("qwen3_moe"), tmp_path, "tensors_static")
    model = load(tmp_path, keeps_fp8=True)
    parameters = dict(model.named_parameters())
    seen = {model_fingerprint(model)}
    for expert in range(4):
        parameter = parameters[f"model.layers.1.mlp.experts.{expert}.down_proj.{part}"]
        parameter.copy_((parameter.float() * 2).to(parameter.dtype))
        seen.add(model_fingerprint(model))
    assert len(seen) == 5


def test_refuses_experts_not_divisible_into_blocks(tmp_path: Path) -> None:
    save_fp8(make_model("qwen3_moe", moe_intermediate_size=48), tmp_path, "channels_dynamic")
    load(tmp_path, keeps_fp8=True)
    change_config(tmp_path, quantization_config=KINDS["fp8_blocks"])
    with pytest.raises(ValueError, match=r"mlp.experts.0.gate_proj is \(48, 256\), but blocks of 128x128 need mult"):
        load(tmp_path, keeps_fp8=True)
    # Expanded weights need no products, but scales of whole blocks.
    tensors = {"model.layers.0.mlp.experts.0.down_proj.weight": torch.zeros(256, 48).to(FP8_DTYPE)}
    tensors["model.layers.0.mlp.experts.0.down_proj.weight_scale_inv"] = torch.ones(2, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.0.down_proj is \(256, 48\), but blocks of 128x128"):
        load(tmp_path)


def test_refuses_shared_experts_not_divisible_into_blocks(tmp_path: Path) -> None:
    make_model("qwen2_moe", shared_expert_intermediate_size=192).config.save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=KINDS["fp8_blocks"])
    with pytest.raises(ValueError, match=r"layers.0.mlp.shared_expert.gate_proj is \(192, 256\), but blocks"):
        load(tmp_path, keeps_fp8=True)
