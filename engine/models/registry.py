"""Which class computes which architecture: so far one computes all."""

import torch

from engine.layers.ops import LayerOps, TorchOps
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderModel

# What the fused kernels compute; float32 stays with torch, whose results are the oracle's.
FUSED_DTYPES = (torch.bfloat16, torch.float16)


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """Allocates a model with weights that are not yet loaded.

    Args:
        dtype: of weights and activations; a float type.
    """
    return DecoderModel(config, dtype, device, _ops(dtype, device))


def _ops(dtype: torch.dtype, device: torch.device) -> LayerOps:
    if device.type != "cuda" or dtype not in FUSED_DTYPES:
        return TorchOps()
    # Imported here: a machine without CUDA has nothing to import.
    from engine.layers.cuda_ops import CudaOps

    return CudaOps(device)
