from dataclasses import replace

import torch

from tandem.choices import Choices
from tandem.engine.collectives.base import Collectives
from tandem.engine.layers.ops import LayerOps, TorchOps
from tandem.engine.layers.ranked_ops import RankedOps
from tandem.engine.models.base import Model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.families.table import ARCHITECTURES

# float32 uses torch, as the reference.
FUSED_DTYPES = (torch.bfloat16, torch.float16)
# Ada was the first with FP8 products.
FP8_CAPABILITY = (8, 9)

_MODELS: Choices[Model] = Choices(
    "tandem.engine.models.base:Model", {name: architecture.model for name, architecture in ARCHITECTURES.items()}
)


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, collectives: Collectives | None = None
) -> Model:
    """Allocates a model with uninitialized weights.

    FP8 weights stay FP8 on GPUs in bfloat16. Elsewhere the model and its configuration have plain weights.

    Args:
        collectives: of the ranks that share the model, each of which holds a part; None: this process holds all.

    Raises:
        ValueError: the GPU does not support FP8 weights.
    """
    if config.quantization is not None and not _multiplies_fp8(dtype, device):
        config = replace(config, quantization=None)
    ops = layer_ops(dtype, device)
    if collectives is not None:
        ops = RankedOps(ops, collectives)
    return _MODELS.load(config.architecture)(config, dtype, device, ops, collectives)


def layer_ops(dtype: torch.dtype, device: torch.device) -> LayerOps:
    """Returns the operations of models of this dtype on a device, without other ranks."""
    if device.type != "cuda" or dtype not in FUSED_DTYPES:
        return TorchOps()
    from tandem.engine.layers.cuda_ops import CudaOps

    return CudaOps(device)


def _multiplies_fp8(dtype: torch.dtype, device: torch.device) -> bool:
    """Raises ValueError on a GPU without FP8, where weights would double in size."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        name, wanted = torch.cuda.get_device_name(device), ".".join(map(str, FP8_CAPABILITY))
        raise ValueError(f"FP8 weights need a GPU of compute capability {wanted} or later, not {name}")
    return True
