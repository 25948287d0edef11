"""Supported architectures and their differences. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """Differences from Llama without biases.

    Attributes:
        model, page_layout: import paths of classes.
        qkv_bias, o_bias, mlp_bias: whether projections have biases, or the key of config.json that says so.
        qk_norm: True if each head's queries and keys are normalized before rotation.
        window_switch: True if use_sliding_window can turn sliding_window off.
        defaults: values of keys missing in config.json, if unlike ModelConfig.from_dir's.
    """

    model: str = "tandem.engine.models.decoder:DecoderModel"
    page_layout: str = "tandem.engine.attention.layout:KvHeadLayout"
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window_switch: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


# Defaults as in Hugging Face's configuration classes. Never an import path: config.json comes with the model and must
# not select code to import.
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Architecture(
        window_switch=False,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
    ),
    "Qwen3ForCausalLM": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
    ),
}
