"""dots.llm1: sigmoid routing with a bias and groups, as DeepSeek has it, and shared experts."""

from collections.abc import Mapping
from typing import Any

from tandem.engine.models.checks import MAX_COUNT, require_count, required
from tandem.engine.models.experts import ExpertNames, ExpertsConfig, Routing
from tandem.engine.models.families.base import Architecture


def _experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    num_dense = raw["first_k_dense_replace"]
    require_count("first_k_dense_replace", num_dense, least=0)
    if num_dense >= num_layers:
        return None
    size, num_shared = required(raw, "moe_intermediate_size"), raw.get("n_shared_experts")
    require_count("moe_intermediate_size", size)
    if num_shared is not None:
        require_count("n_shared_experts", num_shared, MAX_COUNT // size)
    return ExpertsConfig(
        num_experts=required(raw, "n_routed_experts"),
        intermediate_size=size,
        routing=Routing(
            "sigmoid",
            required(raw, "num_experts_per_tok"),
            raw["norm_topk_prob"],
            raw["routed_scaling_factor"],
            has_bias=True,
            num_groups=raw["n_group"],
            num_groups_used=raw["topk_group"],
        ),
        shared_intermediate_size=size * (num_shared or 0),
        dense_layers=tuple(range(num_dense)),
        names=ExpertNames(shared="shared_experts"),
        count_key="n_routed_experts",
    )


DOTS1 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    window_from_layer="max_window_layers",
    defaults={
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    experts=_experts,
    # Other layers would be dense.
    neutral={"moe_layer_freq": 1},
)
