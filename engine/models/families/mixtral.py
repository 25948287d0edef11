"""Mixtral: two of eight experts, weights that sum to one."""

from collections.abc import Mapping
from typing import Any

from tandem.engine.models.checks import required
from tandem.engine.models.experts import ExpertNames, ExpertsConfig, Routing
from tandem.engine.models.families.base import Architecture


def _experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=required(raw, "num_local_experts"),
        intermediate_size=required(raw, "intermediate_size"),
        routing=Routing("softmax", required(raw, "num_experts_per_tok"), normalize=True),
        names=ExpertNames(mlp="block_sparse_moe", gate="w1", up="w3", down="w2"),
        count_key="num_local_experts",
        size_key="intermediate_size",
    )


MIXTRAL = Architecture(
    window_switch=False,
    rope_theta=1e6,
    defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    experts=_experts,
)
