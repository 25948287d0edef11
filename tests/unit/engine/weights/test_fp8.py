"""FP8 checkpoints of every kind, against transformers with the dequantized weights, and refusals."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tandem.engine.attention.choice import choose_backend
from tandem.engine.batch import Batch
from tandem.engine.config import EngineConfig
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.ops import TorchOps
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.mlp.dense import DenseMlp
from tandem.engine.page_layout import page_layout_of
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.fingerprint import model_fingerprint
from tandem.engine.weights.loader import load_weights
from tests.fakes.fp8_checkpoints import EXPERTS, VOCAB_SIZE, make_model, save_fp8
from tests.fakes.fp8_schemes import KINDS

CPU = torch.device("cpu")
NUM_TOKENS = 60
UP = "model.layers.1.mlp.up_proj"
_names = itertools.count()


def load(path: Path, how: str = "auto", *, keeps_fp8: bool = False) -> Model:
    """Args: keeps_fp8: keep FP8 weights and quantized inputs, in plain torch."""
    config = ModelConfig.from_dir(path).quantized(how)
    if keeps_fp8:
        model: Model = DecoderModel(config, torch.float32, CPU, TorchOps())
    else:
        model = build_model(config, torch.float32, CPU)
    load_weights(model, path, "auto", config.quantization, CPU, lambda doing: None)
    return model


def logits_of(model: Model, token_ids: list[int]) -> torch.Tensor:
    """Return the logits after each token: (num_tokens, vocab_size)."""
    config = model.config
    layout = page_layout_of(config, 16, "float32", "auto")
    pool = CpuKvPool(layout, 8, f"test-fp8-{next(_names)}")
    try:
        attention = choose_backend(EngineConfig("m", num_pages=8), layout, config.num_q_heads, CPU)(
            pool, config.num_q_heads
        )
        sequence = TokenSequence(token_ids, len(token_ids), list(range(8)))
        sequence.extend(len(token_ids))
        batch = Batch("prefill", [sequence])
        attention.plan(batch)
        return model.forward(batch.input_ids(CPU), batch.positions(CPU), attention, None)
    finally:
        pool.close()


def tokens() -> list[int]:
    return torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def reference_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens()])).logits[0]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def schemes() -> Iterator[Any]:
    """Yields every kind with Llama, and every other family with one kind; the other pairs are slow."""
    for number, kind in enumerate(KINDS):
        yield pytest.param(kind, "llama")
        for place, family in enumerate(("qwen3", *EXPERTS)):
            is_quick = place % len(KINDS) == number
            yield pytest.param(kind, family, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "family"), list(schemes()))
def test_logits_match_the_dequantized_weights(tmp_path: Path, kind: str, family: str) -> None:
    reference = make_model(family, tie_word_embeddings=family == "qwen3")
    save_fp8(reference, tmp_path, kind)
    expected = reference_logits(reference)
    assert difference(logits_of(load(tmp_path), tokens()), expected) < 1e-5
    # Eight products round their inputs to 3 bits of mantissa, by 3 % on average. Some tokens choose other experts then.
    quantised = difference(logits_of(load(tmp_path, keeps_fp8=True), tokens()), expected)
    assert 0.03 < quantised < (0.25 if family in EXPERTS else 0.15)


def test_plain_weights_become_fp8_when_they_are_loaded(tmp_path: Path) -> None:
    reference = make_model("llama")
    reference.save_pretrained(tmp_path)
    plain = load(tmp_path)
    expected = reference_logits(reference)
    assert difference(logits_of(plain, tokens()), expected) < 1e-5
    model = load(tmp_path, "fp8")
    rounded = dict(model.named_parameters())
    for name, weight in plain.named_parameters():
        if not name.endswith("_proj.weight"):
            assert torch.equal(rounded[name], weight)
            continue
        # FP8 has 3 bits of mantissa, and steps of 2^-9 below 2^-6, where the row's largest number is 448.
        step = torch.maximum(weight.abs() / 16, weight.abs().amax(1, keepdim=True) / 448 / 2**10)
        assert ((rounded[name] - weight).abs() <= step * 1.001).all() and not torch.equal(rounded[name], weight)
    assert 0.03 < difference(logits_of(model, tokens()), expected) < 0.15
    kept = load(tmp_path, "fp8", keeps_fp8=True)
    assert 0.03 < difference(logits_of(kept, tokens()), logits_of(model, tokens())) < 0.15
    save_fp8(reference, tmp_path / "quantised", "blocks")
    config = ModelConfig.from_dir(tmp_path / "quantised")
    assert config.quantized("fp8") == config


def test_projections_of_one_matrix_keep_their_own_scales(tmp_path: Path) -> None:
    reference = make_model("llama")
    with torch.no_grad():
        reference.get_parameter("model.layers.0.self_attn.k_proj.weight").mul_(1000)
    tensors = save_fp8(reference, tmp_path, "tensors_static")
    model = load(tmp_path, keeps_fp8=True)
    held = dict(model.named_parameters())
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{part}"
        assert torch.equal(held[f"{name}.weight"].view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8))
        assert (held[f"{name}.weight_scale"] == tensors[f"{name}.weight_scale"]).all()


def test_ignored_modules_stay_plain(tmp_path: Path) -> None:
    reference = make_model("llama")
    ignored = ("model.layers.0.self_attn.o_proj", UP, UP.replace("up", "gate"))
    save_fp8(reference, tmp_path, "channels_dynamic", ignored)
    assert difference(logits_of(load(tmp_path), tokens()), reference_logits(reference)) < 1e-5
    held = dict(load(tmp_path, keeps_fp8=True).named_parameters())
    fp8 = {name.removesuffix(".weight") for name, tensor in held.items() if tensor.dtype is FP8_DTYPE}
    assert not fp8 & set(ignored) and len(fp8) == 2 * 7 - 3
    save_fp8(make_model("llama"), tmp_path, "channels_dynamic", (UP,))
    with pytest.raises(
        ValueError, match=r"ignores model\.layers\.1\.mlp\.up_proj, but not model\.layers\.1\.mlp\.gate_proj"
    ):
        load(tmp_path, keeps_fp8=True)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        ("channels_dynamic", f"{UP}.weight_scale", None, f"{UP}.weight_scale is missing"),
        ("tensors_static", f"{UP}.input_scale", None, f"{UP}.input_scale is missing"),
        ("fp8_blocks", f"{UP}.weight_scale_inv", None, f"{UP}.weight_scale_inv is missing"),
        ("channels_dynamic", f"{UP}.weight", None, f"{UP}.weight is missing"),
        ("channels_dynamic", f"{UP}.weight_scale", torch.ones(383, 1), r"up_proj.weight_scale has shape \(383, 1\)"),
        ("channels_dynamic", f"{UP}.weight_scale", torch.ones(1), r"has shape \(1,\), not \(384, 1\)"),
        ("tensors_static", f"{UP}.weight_scale", torch.ones(2), r"has shape \(2,\), not \(1,\)"),
        ("tensors_static", f"{UP}.input_scale", torch.ones(384), r"input_scale has shape \(384,\), not \(1,\)"),
        ("blocks", f"{UP}.weight_scale", torch.ones(2, 3), r"has shape \(2, 3\), not \(3, 2\)"),
        ("fp8_static", f"{UP}.weight_scale", torch.zeros(()), "up_proj.weight_scale has a scale that is not a number"),
        ("fp8_static", f"{UP}.weight_scale", torch.tensor(NAN), "weight_scale has a scale that is not a number"),
        ("fp8_static", f"{UP}.weight_scale", torch.tensor(-1.0), "weight_scale has a scale that is not a number"),
        ("fp8_static", f"{UP}.input_scale", torch.tensor(INF), "input_scale has a scale that is not a number"),
        ("fp8_static", f"{UP}.weight_scale", torch.ones((), dtype=torch.int8), "has dtype torch.int8"),
        ("fp8_static", f"{UP}.weight", torch.zeros(384, 256), "has dtype torch.float32, not torch.float8_e4m3fn"),
        ("fp8_static", f"{UP}.weight", torch.zeros(384, 255).to(FP8_DTYPE), r"shape \(384, 255\), not \(384, 256\)"),
        ("fp8_static", f"{UP}.weight", torch.zeros(384).to(FP8_DTYPE), r"has shape \(384,\), which is no matrix"),
        ("fp8_static", f"{UP}.weight", torch.zeros(0, 256).to(FP8_DTYPE), r"has shape \(0, 256\), which is no matrix"),
        ("fp8_dynamic", f"{UP}.input_scale", torch.ones(()), f"tensor {UP}.input_scale is unexpected"),
    ],
)
def test_refuses_malformed_checkpoints(
    tmp_path: Path, kind: str, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = save_fp8(make_model("llama"), tmp_path, kind)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for keeps_fp8 in (False, True):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, keeps_fp8=keeps_fp8)


def test_refuses_fp8_against_the_configuration(tmp_path: Path) -> None:
    save_fp8(make_model("llama"), tmp_path, "channels_dynamic")
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"].append(UP)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{UP}.weight.* is of FP8 weights, though quantization_config ignores {UP}"):
        load(tmp_path)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"float8_e4m3fn, which is not a plain float type|weight_scale is unexpected"):
        load(tmp_path)


def test_refuses_matrices_not_divisible_into_blocks(tmp_path: Path) -> None:
    save_fp8(make_model("llama"), tmp_path, "channels_dynamic")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = KINDS["fp8_blocks"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 320}))
    with pytest.raises(ValueError, match=r"mlp.gate_proj is \(320, 256\), but blocks of 128x128"):
        load(tmp_path, keeps_fp8=True)


def test_a_shallow_model_has_a_layer_of_each_kind_and_the_last(tmp_path: Path) -> None:
    reference = make_model("llama", num_hidden_layers=4)
    ignored = [f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 2)]
    save_fp8(reference, tmp_path, "channels_dynamic", tuple(ignored))
    model = load(tmp_path, keeps_fp8=True)
    assert isinstance(model, DecoderModel)
    shallow = model.shallow()
    assert sorted(map(model._layers.index, shallow._layers)) == [0, 1, 3]
    plain = load(tmp_path)
    assert isinstance(plain, DecoderModel) and len(plain.shallow()._layers) == 2


def test_fingerprints_cover_numbers_and_scales(tmp_path: Path) -> None:
    save_fp8(make_model("llama"), tmp_path, "tensors_static")
    found = set()
    for kind in ("", "weight", "weight_scale", "input_scale"):
        model = load(tmp_path, keeps_fp8=True)
        assert model_fingerprint(model) == model_fingerprint(load(tmp_path, keeps_fp8=True))
        if kind:
            parameter = dict(model.named_parameters())[f"{UP}.{kind}"]
            parameter.copy_((parameter.float() * 2).to(parameter.dtype))
        found.add(model_fingerprint(model))
    assert len(found) == 4
    # A model with dequantized weights computes differently.
    assert model_fingerprint(load(tmp_path)) not in found


def test_scales_of_kv_caches_are_left_out(tmp_path: Path) -> None:
    reference = make_model("llama")
    tensors = save_fp8(reference, tmp_path, "tensors_static")
    for name in ("0.self_attn.k_scale", "0.self_attn.v_scale", "1.self_attn.k_proj.output_scale"):
        tensors[f"model.layers.{name}"] = torch.ones(())
    save_file(tensors, tmp_path / "model.safetensors")
    assert difference(logits_of(load(tmp_path), tokens()), reference_logits(reference)) < 1e-5


def test_dummy_weights_have_typical_sizes(tmp_path: Path) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    for kind in ("fp8_static", "fp8_blocks"):
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": KINDS[kind]}))
        model = DecoderModel(ModelConfig.from_dir(tmp_path), torch.float32, CPU, TorchOps())
        load_weights(model, tmp_path, "dummy", model.config.quantization, CPU, lambda doing: None)
        mlp = model._layers[0].mlp
        assert isinstance(mlp, DenseMlp)
        linear = mlp._gate_up
        assert isinstance(linear, Fp8Linear)
        stands_for = linear.weight.float() * linear.scale.flatten()[0]
        assert 0.019 < stands_for.abs().max() <= 0.02 and stands_for.std() > 0.01
        assert logits_of(model, tokens()).isfinite().all()
