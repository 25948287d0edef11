"""Tiny models of transformers with random weights, for comparisons."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def spread_weights(model: "PreTrainedModel") -> None:
    """Draw weights far from initial values, at which norms and biases have no effect, experts and logits are alike."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)


def tiny_model(family: str, vocab_size: int, settings: Mapping[str, Any]) -> "PreTrainedModel":
    """Returns a model of two layers with spread weights, always the same. Args: family: such as "qwen3-moe"."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family.replace("-", "_"),
        **{
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "eos_token_id": None,
            **settings,
        },
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    spread_weights(model)
    return model
