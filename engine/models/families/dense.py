"""Llama, Mistral, Qwen2 and Qwen3. Defaults are those of Hugging Face's configuration classes."""

from tandem.engine.models.families.base import Architecture

LLAMA = Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
MISTRAL = Architecture(
    window_switch=False,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
QWEN2 = Architecture(
    qkv_bias=True,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
)
QWEN3 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
)
