"""Weights into a model: from a checkpoint's safetensors files, or made up."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.attention.scales import KvScales
from tandem.engine.layers.fp8 import FP8_DTYPE, FP8_MAX
from tandem.engine.models.base import Model
from tandem.engine.models.quantization import Quantization
from tandem.engine.weights.fp8 import read_fp8
from tandem.engine.weights.headers import tensor_names
from tandem.engine.weights.kv_scales import ScaleReader
from tandem.engine.weights.resolve import checkpoint_files

# This is a prime above the number of rows of any matrix: no two rows come out equal.
_DUMMY_PERIOD = 262_147
_DUMMY_SCALE = 0.02
# Inputs of projections are seldom larger than so many times this.
_DUMMY_INPUT_SCALE = 16 / FP8_MAX
# At least so many seconds lie between two messages about progress.
_REPORT_INTERVAL_S = 0.1


def load_weights(
    model: Model,
    model_dir: Path,
    load_format: str,
    quantization: Quantization | None,
    device: torch.device,
    on_progress: Callable[[str], None],
) -> KvScales:
    """Fills a model, tensor by tensor: from the mapped files straight to the device, or made there.

    Args:
        load_format: "auto" reads the checkpoint; "dummy" makes random weights.
        quantization: of the checkpoint, whether or not the model keeps FP8 weights as such.
        on_progress: told how many bytes of how many are loaded, at most ten times a second.

    Returns:
        The scales for quantized pages that the checkpoint has.

    Raises:
        ValueError: the checkpoint is incomplete, corrupt, or not this model's.
    """
    weights: Iterable[tuple[str, torch.Tensor]]
    if load_format == "dummy":
        shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in model.named_parameters()]
        num_bytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in shapes)
        weights = dummy_weights(shapes, device=device)
    else:
        num_bytes = sum(path.stat().st_size for path in checkpoint_files(model_dir))
        weights = checkpoint_weights(model_dir)
    scales = ScaleReader(model.config.num_layers)
    weights = scales.without_scales(_reported(weights, num_bytes, on_progress))
    if quantization is not None and load_format != "dummy":
        weights = read_fp8(weights, quantization, dict(model.named_parameters()), device)
    model.load_weights(weights)
    return scales.scales()


def checkpoint_weights(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, by its Hugging Face name, in the order it lies on disk.

    The tensors are views of the memory-mapped files, in their dtype: copy before writing to one. Nothing is
    read from disk before it is used.

    Raises:
        ValueError: there are no weights, a shard is missing or corrupt, or lacks a tensor the index names.
    """
    for path, expected in checkpoint_files(model_dir).items():
        # The header is checked here and not only before the start: the file may be another one by now.
        names = tensor_names(path, expected)
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    # A shard may hold a tensor that the index takes from another.
                    if expected is None or name in expected:
                        yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a valid safetensors file: {error}") from error


def dummy_weights(
    shapes: Iterable[tuple[str, tuple[int, ...], torch.dtype]], seed: int = 0, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights for measuring without a checkpoint: a forward pass stays finite, the output means nothing.

    A tensor depends on its name, shape and dtype and the seed alone, so every process makes the same ones
    in whatever order, on whatever device. Vectors are ones (norms) unless they are biases; the rest is uniform
    in [-0.02, 0.02). FP8 numbers are uniform over all that there are, under scales that make of them the same.
    """
    for name, shape, dtype in shapes:
        if name.endswith("_scale"):
            scale = _DUMMY_INPUT_SCALE if name.endswith("input_scale") else _DUMMY_SCALE / FP8_MAX
            yield name, torch.full(shape, scale, dtype=dtype, device=device)
            continue
        if len(shape) == 1 and not name.endswith("bias"):
            yield name, torch.ones(shape, dtype=dtype, device=device)
            continue
        count = math.prod(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
        # Large tensors repeat one stretch of numbers: drawing billions would take longer than any benchmark.
        largest = FP8_MAX if dtype is FP8_DTYPE else _DUMMY_SCALE
        drawn = torch.empty(min(count, _DUMMY_PERIOD)).uniform_(-largest, largest, generator=generator)
        # They are drawn and rounded on the CPU, where the numbers are the same for all.
        stretch = drawn.to(dtype).to(device)
        if dtype is FP8_DTYPE:
            # Not all devices move FP8 numbers about in every way; bytes are moved everywhere.
            stretch = stretch.view(torch.uint8)
        yield name, stretch.repeat(math.ceil(count / len(stretch)))[:count].view(dtype).view(shape)


def _reported(
    weights: Iterable[tuple[str, torch.Tensor]], num_bytes: int, on_progress: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights; what was asked for before counts as loaded when the next is asked for."""
    num_loaded, reported_at = 0, -math.inf
    for name, tensor in weights:
        if (now := time.monotonic()) - reported_at >= _REPORT_INTERVAL_S:
            reported_at = now
            on_progress(f"loading weights ({num_loaded / 1e9:.2f} of {num_bytes / 1e9:.2f} GB)")
        yield name, tensor
        num_loaded += tensor.nbytes
