"""Makes the model of a configuration, by the class that its architecture names."""

import torch

from engine.layers.ops import LayerOps, TorchOps
from engine.models.architectures import ARCHITECTURES
from engine.models.base import Model
from engine.models.config import ModelConfig
from tandem.choices import Choices

# The fused kernels compute these; float32 stays with torch, whose results are the oracle's.
FUSED_DTYPES = (torch.bfloat16, torch.float16)

_MODELS: Choices[Model] = Choices(
    "engine.models.base:Model", {name: architecture.model for name, architecture in ARCHITECTURES.items()}
)


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """Allocates a model with weights that are not yet loaded.

    Args:
        dtype: of weights and activations; a float type.
    """
    return _MODELS.load(config.architecture)(config, dtype, device, _ops(dtype, device))


def _ops(dtype: torch.dtype, device: torch.device) -> LayerOps:
    if device.type != "cuda" or dtype not in FUSED_DTYPES:
        return TorchOps()
    # Imported here: a machine without CUDA has nothing to import.
    from engine.layers.cuda_ops import CudaOps

    return CudaOps(device)
