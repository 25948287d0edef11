"""Random checkpoints for scenarios on a GPU."""

from pathlib import Path

import torch

from tests.cluster.conftest import VOCAB_SIZE
from tests.gpu.engine.models.test_decoder import FAMILIES

# Leaves a direction in the hidden state to the embedding alone.
DAMPING = 0.01


def save_latent_model(directory: Path, num_dense: int = 1) -> None:
    """Saves a DeepSeek-V3 of two layers. Args: num_dense: first layers without experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {name: size for name, size in FAMILIES["deepseek_v3"].items() if name != "head_dim"}
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=1024,
        **{**sizes, "first_k_dense_replace": num_dense},
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.05)
    model.float().save_pretrained(directory)


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
