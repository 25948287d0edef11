"""Copies a checkpoint's tensors into the parameters that hold them, or parts of them."""

from collections.abc import Callable, Iterable

import torch

from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.models.base import Weights
from tandem.engine.models.part import Part

# Other dtypes need scales, which only FP8 projections have.
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fill(
    held: Weights,
    weights: Iterable[tuple[str, torch.Tensor]],
    part_of: Callable[[str, torch.Tensor], torch.Tensor | None],
) -> None:
    """Fills named_parameters, tensor by tensor, so that a lazy `weights` never holds a second full copy.

    Args:
        part_of: returns the part of a tensor that belongs here, by the tensor's name; None: nothing does.

    Raises:
        ValueError: a tensor is missing, unexpected, repeated, or of the wrong shape or dtype.
    """
    parameters, parts = dict(held.named_parameters()), held.parts()
    missing = dict.fromkeys(parameters)
    for name, whole in weights:
        # Old checkpoints have this buffer; the configuration defines it.
        if name.endswith("rotary_emb.inv_freq"):
            continue
        tensor = part_of(name, whole)
        if tensor is None:
            continue
        if name not in parameters:
            raise ValueError(f"tensor {name} is unexpected")
        if name not in missing:
            raise ValueError(f"tensor {name} is duplicated")
        parameters[name].copy_(held_part(name, tensor, parameters[name], parts.get(name)))
        del missing[name]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"tensor {next(iter(missing))} is missing{more}")


def held_part(name: str, tensor: torch.Tensor, parameter: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Returns the part of a checkpoint's tensor that belongs into the parameter. Args: part: None: all of it."""
    whole = parameter.shape if part is None else part.whole
    if tensor.shape != whole:
        raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, not {tuple(whole)}")
    if parameter.dtype is FP8_DTYPE:
        if tensor.dtype is not FP8_DTYPE:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}, not {FP8_DTYPE}")
    elif tensor.dtype not in _WEIGHT_DTYPES:
        raise ValueError(f"tensor {name} has dtype {tensor.dtype}, which is not a plain float type")
    return tensor if part is None else part.of(tensor)
