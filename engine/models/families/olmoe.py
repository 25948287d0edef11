"""OLMoE: queries and keys normalized across heads."""

from collections.abc import Mapping
from typing import Any

from tandem.engine.models.checks import required
from tandem.engine.models.experts import ExpertsConfig, Routing
from tandem.engine.models.families.base import Architecture


def _experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=required(raw, "num_experts"),
        intermediate_size=required(raw, "intermediate_size"),
        routing=Routing("softmax", required(raw, "num_experts_per_tok"), raw["norm_topk_prob"]),
        size_key="intermediate_size",
    )


OLMOE = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    whole_qk_norm=True,
    defaults={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    experts=_experts,
    neutral={"clip_qkv": None},
)
