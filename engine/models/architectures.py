"""The architectures that are served, and what distinguishes them.

Importing this costs no torch: configurations are checked without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture is computed, and how it differs from the plain decoder: Llama without biases.

    Attributes:
        model: import path of the tandem.engine.models.base.Model that computes it.
        page_layout: import path of the tandem.engine.kvcache.base.PageLayout of what its attention keeps of each token.
        qkv_bias, o_bias, mlp_bias: whether these projections have biases, or the key of config.json that says so.
        qk_norm: whether each head's queries and keys are normalised before they are rotated.
        window_switch: whether use_sliding_window in config.json can turn sliding_window off.
        defaults: values of keys that config.json leaves out, where not those of ModelConfig.from_dir.
    """

    model: str = "tandem.engine.models.decoder:DecoderModel"
    page_layout: str = "tandem.engine.attention.layout:KvHeadLayout"
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window_switch: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


# Their names are those in config.json. The defaults are those of Hugging Face's configuration classes.
#
# Unlike the other choices, an architecture is never taken by import path: config.json comes with the model, from
# strangers, and a name in it must not decide which code of this machine is imported.
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
