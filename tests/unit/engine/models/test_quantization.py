"""Supported and rejected quantization_config schemes."""

from typing import Any

import pytest

from tandem.engine.models.quantization import Quantization, read_quantization
from tests.fakes.fp8_schemes import BLOCKS, GROUPS, KINDS, STATIC, TOKEN, scheme

TENSOR, CHANNEL = {"strategy": "tensor"}, {"strategy": "channel"}
SERVED = {
    "tensors_static": ("tensor", "static", "weight_scale"),
    # A scale for the whole batch would let requests change each other's tokens.
    "tensors_dynamic": ("tensor", "token", "weight_scale"),
    "channels_static": ("channel", "static", "weight_scale"),
    "channels_dynamic": ("channel", "token", "weight_scale"),
    "blocks": ("block", "group", "weight_scale"),
    "fp8_static": ("tensor", "static", "weight_scale"),
    "fp8_dynamic": ("tensor", "token", "weight_scale"),
    "fp8_blocks": ("block", "group", "weight_scale_inv"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_reads_supported_schemes(kind: str) -> None:
    found = read_quantization({"quantization_config": KINDS[kind]})
    assert found is not None and not found.at_load
    assert (found.weights, found.inputs, found.scale_name) == SERVED[kind]


def test_reads_the_old_key_and_its_absence() -> None:
    assert read_quantization({}) is None and read_quantization({"quantization_config": None}) is None
    config = {key: value for key, value in KINDS["channels_dynamic"].items() if key != "quant_method"}
    assert read_quantization({"compression_config": config}) == Quantization("channel", "token", ("lm_head",))


def test_modules_are_ignored_by_name_by_end_and_by_pattern() -> None:
    layer = "model.layers.10.mlp"
    for pattern, ignored, not_ignored in (
        (f"{layer}.up_proj", f"{layer}.up_proj", f"{layer}.down_proj"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", f"{layer}.up_proj"),
        ("up_proj", f"{layer}.up_proj", f"{layer}.down_proj"),
        # An expert router is not a projection with the same prefix.
        (f"{layer}.gate", f"{layer}.gate", f"{layer}.gate_proj"),
        ("re:.*layers\\.1\\d\\..*", f"{layer}.up_proj", "model.layers.2.mlp.up_proj"),
    ):
        found = Quantization(ignored=("lm_head", pattern))
        assert found.covered([ignored, not_ignored]) == [False, True], pattern
    assert Quantization(ignored=("lm_head",)).covered(["lm_head", "model.lm_head_proj"]) == [False, True]


def two_groups() -> dict[str, Any]:
    config = scheme(CHANNEL, TOKEN)
    config["config_groups"]["group_1"] = scheme(TENSOR, TOKEN)["config_groups"]["group_0"]
    return config


def with_group(**changes: Any) -> dict[str, Any]:
    config = scheme(CHANNEL, TOKEN)
    config["config_groups"]["group_0"].update(changes)
    return config


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([], "quantization_config must be an object"),
    "no method": ({}, "quant_method None is not supported; supported are FP8 weights"),
    "awq": ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' is not supported; supported are FP8 weights"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' is not supported"),
    "int8": (scheme(CHANNEL | {"type": "int"}, TOKEN), "weights has 8 bits of type 'int', which is not"),
    "w4": (scheme(CHANNEL | {"num_bits": 4, "type": "int"}, TOKEN), "weights has 4 bits of type 'int'"),
    "int8 inputs": (scheme(CHANNEL, TOKEN | {"type": "int"}), "input_activations has 8 bits of type 'int'"),
    "weights alone": (with_group(input_activations=None), "input_activations is not set, but FP8"),
    "outputs": (with_group(output_activations={}), "output_activations is set"),
    "some layers": (with_group(targets=["re:.*mlp.*"]), r"targets must be \['Linear'\]"),
    "two schemes": (two_groups(), "config_groups must have one scheme for all layers, not 2"),
    "no scheme": ({"quant_method": "compressed-tensors"}, "config_groups must be an object, not None"),
    "empty": ({"quant_method": "compressed-tensors", "config_groups": {}}, "one scheme for all layers, not 0"),
    "asymmetric": (scheme(CHANNEL | {"symmetric": False}, TOKEN), "weights is not symmetric"),
    "dynamic weights": (scheme(CHANNEL | {"dynamic": True}, TOKEN), "weights.dynamic is set"),
    "grouped weights": (scheme({"strategy": "group"}, TOKEN), "weights by 'group' with dynamic inputs by 'token'"),
    "static tokens": (scheme(CHANNEL, TOKEN | {"dynamic": False}), "with static inputs by 'token' are not supported"),
    "small blocks": (scheme(BLOCKS | {"block_structure": [64, 64]}, GROUPS), r"block_structure \[64, 64\] is not"),
    "small groups": (scheme(BLOCKS, GROUPS | {"group_size": 64}), "weights by 'block' with dynamic inputs by 'group'"),
    "blocks by tensor": (scheme(BLOCKS, STATIC), "weights by 'block' with static inputs by 'tensor' are not supported"),
    "sparse": (scheme(CHANNEL, TOKEN) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    "fp8 small blocks": (FP8 | {"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\] is not supported"),
    "fp8 static blocks": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
        "activation_scheme static with weight_block_size",
    ),
    "fp8 without scheme": ({"quant_method": "fp8"}, "activation_scheme must be static or dynamic, not None"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    "powers of two": (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' is not supported"),
    "names": (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
    "no pattern": (scheme(CHANNEL, TOKEN) | {"ignore": ["re:("]}, r"ignore has 're:\(', an invalid pattern"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_unsupported_schemes(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization({"quantization_config": config})
