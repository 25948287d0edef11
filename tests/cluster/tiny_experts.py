"""A tiny mixture of experts with byte tokens."""

from pathlib import Path
from typing import Any

from tests.cluster.conftest import EOS_TOKEN_IDS, MAX_MODEL_LEN, VOCAB_SIZE, save_tiny_model

# By the name of transformers' model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "head_dim": 32,
    }
}


def save_tiny_experts(directory: Path, family: str) -> None:
    """Save two layers of random weights in float32, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    save_tiny_model(directory)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_IDS,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(directory)
