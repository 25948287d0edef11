"""Which class computes which architecture."""

from importlib import import_module

import torch

from tandem.engine.models.architectures import MODEL_CLASSES
from tandem.engine.models.base import Model
from tandem.engine.models.config import ModelConfig


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """Allocates a model with weights that are not yet loaded.

    Args:
        dtype: of weights and activations; a float type.
    """
    module, _, name = MODEL_CLASSES[config.architecture].partition(":")
    model: Model = getattr(import_module(module), name)(config, dtype, device)
    return model
