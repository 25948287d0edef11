"""Derives config.json from the metadata of a GGUF file."""

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem.engine.weights.gguf.families import FAMILIES, OUTPUT, ExpertKeys, Family
from tandem.engine.weights.gguf.metadata import ModelMetadata
from tandem.engine.weights.gguf.tokenizer import check_tokens, token_id

# Each changes the arithmetic; supported models lack it or have one of these values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (1.0,),
    # 1 is softmax.
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.factor": (1.0,),
    "rope.scaling.type": ("none",),
}


class ModelDescription(NamedTuple):
    """
    Attributes:
        config: content of config.json, without the scaling of rotary frequencies.
        sizes: by the names in TensorSpec.shape.
        block_count: key of the metadata for the number of layers.
    """

    family: Family
    config: dict[str, Any]
    sizes: dict[str, int]
    block_count: str


def describe(raw: Mapping[str, Any], tensor_names: frozenset[str]) -> ModelDescription:
    """Reads all metadata but the tokenizer's.

    Raises:
        ValueError: the model is not supported, or a key is missing or malformed. The message names the key.
    """
    metadata, family = _family(raw)
    check_tokens(raw)
    metadata.refuse_other(_NEUTRAL)
    hidden, num_heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    if hidden % num_heads and not metadata.has("attention.key_length"):
        raise ValueError(
            f"{metadata.key('embedding_length')} {hidden} is not a multiple of {num_heads} attention heads"
        )
    head_dim = metadata.count("attention.key_length", hidden // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := metadata.count(name, head_dim)) != head_dim:
            raise ValueError(f"{metadata.key(name)} = {value} differs from the head size {head_dim}: not supported")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": OUTPUT not in tensor_names,
        "bos_token_id": token_id(raw, "bos"),
        "eos_token_id": _eos_token_ids(raw),
        "pad_token_id": token_id(raw, "padding"),
        "vocab_size": len(raw["tokenizer.ggml.tokens"]),
        **family.fixed,
    }
    sizes = {
        "one": 1,
        "hidden": hidden,
        "inner": config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "head": head_dim,
        "query": num_heads * head_dim,
        "key": config["num_key_value_heads"] * head_dim,
    }
    if family.experts is not None:
        _add_experts(metadata, family.experts, config, sizes)
    return ModelDescription(family, config, sizes, metadata.key("block_count"))


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if config[name] is not None}


def _family(raw: Mapping[str, Any]) -> tuple[ModelMetadata, Family]:
    architecture = raw.get("general.architecture")
    known = sorted({name for name, _ in FAMILIES})
    if not isinstance(architecture, str) or architecture not in known:
        raise ValueError(
            f"architecture {reprlib.repr(architecture)} is not supported in GGUF; supported: {', '.join(known)}"
        )
    if (num_parts := raw.get("split.count", 0)) not in (0, 1):
        raise ValueError(
            f"split.count = {reprlib.repr(num_parts)}: a model split into several files is not supported; merge them"
        )
    metadata = ModelMetadata(raw, architecture)
    num_experts = metadata.count("expert_count", 0, least=0)
    if (architecture, num_experts > 0) not in FAMILIES:
        raise ValueError(
            f"{metadata.key('expert_count')} = {num_experts} is not supported: {architecture} "
            f"{'has no' if num_experts else 'is a mixture of'} experts"
        )
    return metadata, FAMILIES[architecture, num_experts > 0]


def _add_experts(metadata: ModelMetadata, keys: ExpertKeys, config: dict[str, Any], sizes: dict[str, int]) -> None:
    num_experts, num_used = metadata.count("expert_count"), metadata.count("expert_used_count")
    if num_used > num_experts:
        raise ValueError(
            f"{metadata.key('expert_used_count')} {num_used} is more than {metadata.key('expert_count')} {num_experts}"
        )
    config[keys.count], config["num_experts_per_tok"] = num_experts, num_used
    inner = config["intermediate_size"]
    sizes["experts"], sizes["expert"] = num_experts, inner
    if keys.size:
        size = metadata.count("expert_feed_forward_length", max(1, inner // num_used))
        config[keys.size] = sizes["expert"] = size
    if keys.shared_size:
        config[keys.shared_size] = sizes["shared"] = metadata.count("expert_shared_feed_forward_length", inner)
    normalizes = metadata.flag("expert_weights_norm", keys.normalizes)
    if keys.normalize:
        config[keys.normalize] = normalizes
    elif not normalizes:
        raise ValueError(f"{metadata.key('expert_weights_norm')} = False is not supported")


def _eos_token_ids(raw: Mapping[str, Any]) -> int | list[int] | None:
    ids = [token_id(raw, name) for name in ("eos", "eot", "eom")]
    unique = [index for index in dict.fromkeys(ids) if index is not None]
    return unique if len(unique) > 1 else next(iter(unique), None)
