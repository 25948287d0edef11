import math
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import compress

import torch

from tandem.engine.layers.fp8 import FP8_DTYPE, dequantize, quantize_channels
from tandem.engine.layers.fp8_linear import check_sizes
from tandem.engine.models.base import Weights
from tandem.engine.models.quantization import BLOCK, Quantization

_INPUT_SCALE = "input_scale"


def read_fp8(
    weights: Iterable[tuple[str, torch.Tensor]],
    quantization: Quantization,
    model: Weights,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a checkpoint's tensors under the model's names and in its shapes.

    FP8 weights get a float32 scale for each output or block (X.weight_scale), and X.input_scale, without dimensions, if
    inputs have a fixed scale. Modules that the model has in plain numbers get dequantized weights in float32.

    Args:
        quantization: of the checkpoint, even if the model has plain weights.
        device: where plain weights are quantized.

    Raises:
        ValueError: a tensor is missing, repeated, or of the wrong shape or dtype, or a scale is invalid; the message
            names the tensor.
    """
    projections = list(model.projections())
    covered = frozenset(compress(projections, quantization.covered(projections)))
    kept = covered if model.config.quantization is not None else frozenset()
    if quantization.at_load:
        return _quantized(weights, covered, kept, device)
    return _as_stored(weights, quantization, covered, kept)


def _quantized(
    weights: Iterable[tuple[str, torch.Tensor]], covered: Set[str], kept: Set[str], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module not in covered or tensor.dim() != 2:
            yield name, tensor
            continue
        yield from _for_model(module, *quantize_channels(tensor.to(device)), kept)


def _as_stored(
    weights: Iterable[tuple[str, torch.Tensor]], quantization: Quantization, covered: Set[str], kept: Set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = ("weight", quantization.scale_name, *((_INPUT_SCALE,) if quantization.inputs == "static" else ()))
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and tensor.dtype is not FP8_DTYPE:
            if module in covered:
                raise ValueError(
                    f"tensor {name} has dtype {tensor.dtype}, not {FP8_DTYPE}, though quantization_config does not "
                    f"ignore {module}"
                )
            yield name, tensor
            continue
        if kind not in wanted:
            yield name, tensor
            continue
        # Other modules may be FP8 in the checkpoint, but are plain in every model.
        if module not in covered and not all(quantization.covered([module])):
            raise ValueError(f"tensor {name} is of FP8 weights, though quantization_config ignores {module}")
        of_module = parts.setdefault(module, {})
        if kind in of_module:
            raise ValueError(f"tensor {name} comes twice")
        of_module[kind] = tensor
        if len(of_module) < len(wanted):
            continue
        del parts[module]
        scale = _weight_scale(module, of_module, quantization, module in covered)
        yield from _for_model(module, of_module["weight"], scale, kept)
        if _INPUT_SCALE in of_module:
            input_scale = _checked(f"{module}.{_INPUT_SCALE}", of_module[_INPUT_SCALE], (1,), ())
            if module in kept:
                yield f"{module}.{_INPUT_SCALE}", input_scale.view(())
    for module, of_module in parts.items():
        missing = next(kind for kind in wanted if kind not in of_module)
        raise ValueError(f"tensor {module}.{missing} is missing")


def _for_model(
    module: str, weight: torch.Tensor, scale: torch.Tensor, kept: Set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    if module in kept:
        yield f"{module}.weight", weight
        yield f"{module}.weight_scale", scale
    else:
        yield f"{module}.weight", dequantize(weight, scale)


def _weight_scale(
    module: str, parts: Mapping[str, torch.Tensor], quantization: Quantization, is_covered: bool
) -> torch.Tensor:
    """Returns (out_size, 1) or (out_size / BLOCK, in_size / BLOCK) float32, rounded up for modules that are plain in
    every model."""
    weight, name = parts["weight"], f"{module}.{quantization.scale_name}"
    scale = parts[quantization.scale_name]
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"tensor {module}.weight has shape {tuple(weight.shape)}, which is no matrix")
    out_size, in_size = weight.shape
    if quantization.weights == "tensor":
        return _checked(name, scale, (1,), (), (1, 1)).view(1, 1).expand(out_size, 1)
    if quantization.weights == "channel":
        return _checked(name, scale, (out_size, 1), (out_size,)).view(out_size, 1)
    if is_covered:
        check_sizes([module], [out_size], in_size, is_block=True)
    return _checked(name, scale, (-(-out_size // BLOCK), -(-in_size // BLOCK)))


def _checked(name: str, scale: torch.Tensor, *shapes: tuple[int, ...]) -> torch.Tensor:
    if tuple(scale.shape) not in shapes:
        raise ValueError(f"tensor {name} has shape {tuple(scale.shape)}, not {shapes[0]}")
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"tensor {name} has dtype {scale.dtype}, which is not a plain float type")
    scale = scale.float()
    lowest, highest = scale.aminmax()
    # False for NaN.
    if not 0 < lowest.item() <= highest.item() < math.inf:
        raise ValueError(f"tensor {name} has a scale that is not a number greater than 0")
    return scale
