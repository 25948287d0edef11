"""quantization_config of every kind of FP8 checkpoint on the hub."""

from typing import Any

from tandem.engine.models.quantization import BLOCK


def scheme(weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"dynamic": False} | weights,
        "input_activations": number | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


STATIC, TOKEN = {"strategy": "tensor", "dynamic": False}, {"strategy": "token", "dynamic": True}
BLOCKS = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
GROUPS = {"strategy": "group", "group_size": BLOCK, "dynamic": True}
# quantization_config by name.
KINDS: dict[str, dict[str, Any]] = {
    "tensors_static": scheme({"strategy": "tensor"}, STATIC),
    "tensors_dynamic": scheme({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}),
    "channels_static": scheme({"strategy": "channel"}, STATIC),
    "channels_dynamic": scheme({"strategy": "channel"}, TOKEN),
    "blocks": scheme(BLOCKS, GROUPS),
    "fp8_static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8_dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8_blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    },
}
