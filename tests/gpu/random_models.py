"""Random checkpoints for tests on a GPU."""

from pathlib import Path
from typing import Any

import torch

from tests.cluster.conftest import VOCAB_SIZE

_LATENT: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 6,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 96, "n_group": 4, "topk_group": 2},
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 96, "qk_nope_head_dim": 96, "v_head_dim": 128},
}
# Leaves a direction in the hidden state to the embedding alone.
DAMPING = 0.01


def save_random_model(directory: Path, family: str, **sizes: Any) -> None:
    """Saves a float32 model large enough for the kernels of bfloat16 and FP8.

    Args:
        sizes: of its configuration, beside or instead of those here. Without a head_dim there is none.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 384,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "max_position_embeddings": 1024,
        **sizes,
    }
    config = AutoConfig.for_model(
        family, **{name: value for name, value in settings.items() if name != "head_dim" or value}
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.05)
    model.float().save_pretrained(directory)


def save_latent_model(directory: Path, num_dense: int = 1) -> None:
    """Saves a DeepSeek-V3 of two layers. Args: num_dense: first layers without experts."""
    sizes = {**LATENT["deepseek_v3"], "first_k_dense_replace": num_dense, "num_hidden_layers": 2}
    save_random_model(directory, "deepseek_v3", **sizes)


def let_count_up(directory: Path) -> None:
    """Changes a checkpoint so that each token's successor is the next id, by far. So rounding changes no token."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(DAMPING)
    weights["model.norm.weight"].fill_(1.0)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].roll(1, 0).contiguous()
    save_file(weights, path, {"format": "pt"})
