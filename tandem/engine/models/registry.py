"""Which class computes which architecture: so far one computes all."""

import torch

from tandem.engine.models.base import Model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """Allocates a model with weights that are not yet loaded.

    Args:
        dtype: of weights and activations; a float type.
    """
    return DecoderModel(config, dtype, device)
