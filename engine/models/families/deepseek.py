"""DeepSeek-V2, V3 and V3.2, and GLM-4.7-Flash: latent attention, and experts in groups beside shared ones.

Defaults are those of Hugging Face's configuration classes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.engine.models.checks import MAX_COUNT, require_count, required
from tandem.engine.models.experts import ExpertNames, ExpertsConfig, Routing
from tandem.engine.models.families.base import Architecture
from tandem.engine.models.latent import IndexerConfig, LatentConfig

_DENSE, _SPARSE = "dense", "sparse"


def experts_by_sigmoid(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    """Reads DeepSeek-V3's mixture behind its first dense layers; raises ValueError."""
    return _behind_dense(raw, num_layers, _routing_by_sigmoid)


def _experts_by_softmax(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    return _behind_dense(raw, num_layers, _routing_by_softmax)


def _experts_of_listed_layers(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    types = raw.get("mlp_layer_types")
    if types is None:
        types = [_DENSE] + [_SPARSE] * (num_layers - 1)
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (_DENSE, _SPARSE) for kind in types):
        raise ValueError(f"mlp_layer_types must list {_DENSE} or {_SPARSE} for {num_layers} layers, not {types!r}")
    if _SPARSE not in types:
        return None
    dense_layers = tuple(layer for layer, kind in enumerate(types) if kind == _DENSE)
    return _experts(raw, dense_layers, _routing_by_sigmoid(raw))


def _experts_of_v32(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    """Checkpoints count their dense layers, transformers lists all."""
    by_kind = _experts_of_listed_layers if raw.get("mlp_layer_types") is not None else experts_by_sigmoid
    return by_kind(raw, num_layers)


def _behind_dense(
    raw: Mapping[str, Any], num_layers: int, routing: Callable[[Mapping[str, Any]], Routing]
) -> ExpertsConfig | None:
    num_dense = raw["first_k_dense_replace"]
    require_count("first_k_dense_replace", num_dense, least=0)
    return None if num_dense >= num_layers else _experts(raw, tuple(range(num_dense)), routing(raw))


def _routing_by_sigmoid(raw: Mapping[str, Any]) -> Routing:
    return Routing(
        "sigmoid",
        required(raw, "num_experts_per_tok"),
        raw["norm_topk_prob"],
        raw["routed_scaling_factor"],
        has_bias=True,
        num_groups=raw["n_group"],
        num_groups_used=raw["topk_group"],
    )


def _routing_by_softmax(raw: Mapping[str, Any]) -> Routing:
    method = raw["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method must be greedy or group_limited_greedy, not {method!r}")
    return Routing(
        "softmax",
        required(raw, "num_experts_per_tok"),
        scaling=raw["routed_scaling_factor"],
        num_groups=1 if method == "greedy" else required(raw, "n_group"),
        num_groups_used=1 if method == "greedy" else required(raw, "topk_group"),
        num_ranked=1,
        float32_logits=True,
    )


def _experts(raw: Mapping[str, Any], dense_layers: tuple[int, ...], routing: Routing) -> ExpertsConfig:
    size, num_shared = required(raw, "moe_intermediate_size"), raw.get("n_shared_experts")
    require_count("moe_intermediate_size", size)
    if num_shared is not None:
        require_count("n_shared_experts", num_shared, MAX_COUNT // size)
    return ExpertsConfig(
        num_experts=required(raw, "n_routed_experts"),
        intermediate_size=size,
        routing=routing,
        shared_intermediate_size=size * (num_shared or 0),
        dense_layers=dense_layers,
        names=ExpertNames(shared="shared_experts"),
        count_key="n_routed_experts",
    )


def _latent(raw: Mapping[str, Any]) -> LatentConfig:
    num_heads, num_kv_heads = required(raw, "num_attention_heads"), raw.get("num_key_value_heads")
    if num_kv_heads is not None and num_kv_heads != num_heads:
        raise ValueError(
            f"num_key_value_heads {num_kv_heads} differs from num_attention_heads {num_heads}, but a latent has keys "
            "and values for every head"
        )
    q_rank = raw["q_lora_rank"]
    if q_rank is not None:
        require_count("q_lora_rank", q_rank)
    return LatentConfig(
        q_rank=q_rank or 0,
        kv_rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
    )


def _indexed_latent(raw: Mapping[str, Any]) -> LatentConfig:
    latent = _latent(raw)
    if not latent.q_rank:
        raise ValueError("q_lora_rank is missing, but index queries are projected from the queries' latent")
    return latent


def _indexer(raw: Mapping[str, Any]) -> IndexerConfig:
    return IndexerConfig(raw["index_n_heads"], raw["index_head_dim"], raw["index_topk"])


_SIZES = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_EXTRA_LAYERS = "num_nextn_predict_layers"
# Other layers would be dense, and other scores would choose other experts.
_BY_SIGMOID = {
    "attention_bias": False,
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_LAYOUT = "tandem.engine.attention.latent_layout:LatentLayout"
DEEPSEEK_V2 = Architecture(
    page_layout=_LAYOUT,
    defaults={
        **_SIZES,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    experts=_experts_by_softmax,
    latent=_latent,
    neutral={
        "attention_bias": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
)
_V3_DEFAULTS = {
    **_SIZES,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    _EXTRA_LAYERS: 1,
}
DEEPSEEK_V3 = Architecture(
    page_layout=_LAYOUT,
    defaults=_V3_DEFAULTS,
    experts=experts_by_sigmoid,
    latent=_latent,
    extra_layers=_EXTRA_LAYERS,
    neutral=_BY_SIGMOID,
)
DEEPSEEK_V32 = Architecture(
    page_layout="tandem.engine.attention.indexed_layout:IndexedLayout",
    defaults={**_V3_DEFAULTS, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    experts=_experts_of_v32,
    latent=_indexed_latent,
    indexer=_indexer,
    layer_type="indexed_attention",
    extra_layers=_EXTRA_LAYERS,
    neutral={**_BY_SIGMOID, "mlp_bias": False},
)
GLM4_MOE_LITE = Architecture(
    page_layout=_LAYOUT,
    defaults={
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        _EXTRA_LAYERS: 1,
    },
    experts=_experts_of_listed_layers,
    latent=_latent,
    extra_layers=_EXTRA_LAYERS,
    # mlp_layer_types says which layers are dense.
    neutral={**_BY_SIGMOID, "first_k_dense_replace": 1},
)
