"""dots.llm1: DeepSeek-V3's experts behind attention by head."""

from tandem.engine.models.families.base import Architecture
from tandem.engine.models.families.deepseek import experts_by_sigmoid

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
    experts=experts_by_sigmoid,
    # Other layers would be dense.
    neutral={"moe_layer_freq": 1},
)
