"""Qwen2-MoE and Qwen3-MoE: many small experts; Qwen2-MoE adds a shared one with a gate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem.engine.models.checks import require_count, required
from tandem.engine.models.experts import MAX_EXPERTS, ExpertsConfig, Routing
from tandem.engine.models.families.base import Architecture

_DEFAULTS = {
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
}


def _experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    (count_key, num_experts), dense = _num_experts(raw), _dense_layers(raw, num_layers)
    if num_experts == 0 or len(dense) == num_layers:
        return None
    return ExpertsConfig(
        num_experts=num_experts,
        intermediate_size=raw["moe_intermediate_size"],
        routing=Routing("softmax", raw["num_experts_per_tok"], raw["norm_topk_prob"]),
        dense_layers=dense,
        count_key=count_key,
    )


def _with_shared(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    experts = _experts(raw, num_layers)
    if experts is None:
        return None
    size = required(raw, "shared_expert_intermediate_size")
    require_count("shared_expert_intermediate_size", size)
    return replace(experts, shared_intermediate_size=size, shared_gate=True)


def _num_experts(raw: Mapping[str, Any]) -> tuple[str, int]:
    """Returns key and value. Hugging Face's newer versions write num_local_experts."""
    keys = [key for key in ("num_experts", "num_local_experts") if raw.get(key) is not None]
    if not keys:
        raise ValueError("num_experts is missing")
    for key in keys:
        require_count(key, raw[key], MAX_EXPERTS, least=0)
    if raw[keys[0]] != raw[keys[-1]]:
        raise ValueError(f"num_experts {raw[keys[0]]} contradicts num_local_experts {raw[keys[-1]]}")
    return keys[0], int(raw[keys[0]])


def _dense_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    step, listed = raw["decoder_sparse_step"], raw.get("mlp_only_layers")
    require_count("decoder_sparse_step", step)
    if listed is None:
        listed = []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ValueError(f"mlp_only_layers must be a list of layers, not {listed!r}")
    absent = [layer for layer in listed if not 0 <= layer < num_layers]
    if absent:
        raise ValueError(f"mlp_only_layers has layer {absent[0]}, but num_hidden_layers is {num_layers}")
    always_dense = set(listed)
    return tuple(layer for layer in range(num_layers) if layer in always_dense or (layer + 1) % step)


QWEN2_MOE = Architecture(
    qkv_bias="qkv_bias",
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    experts=_with_shared,
)
QWEN3_MOE = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    experts=_experts,
)
