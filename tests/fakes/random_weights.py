"""Random weights of transformers' models for comparisons."""

from typing import TYPE_CHECKING

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
