"""Which class computes which architecture.

Importing this costs no torch, so that a configuration can be checked by a process without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tandem.engine.models.base import Model
    from tandem.engine.models.config import ModelConfig

# Architecture, as config.json names it, to "module:class". A class is made from (config, dtype, device).
MODEL_CLASSES = {
    "LlamaForCausalLM": "tandem.engine.models.llama:LlamaModel",
}


def build_model(config: "ModelConfig", dtype: "torch.dtype", device: "torch.device") -> "Model":
    """Allocates a model with weights that are not yet loaded.

    Args:
        dtype: of weights and activations; a float type.
    """
    module, _, name = MODEL_CLASSES[config.architecture].partition(":")
    model: Model = getattr(import_module(module), name)(config, dtype, device)
    return model
