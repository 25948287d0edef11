"""Fills a model with weights: from a checkpoint's safetensors files, or random ones."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.attention.scales import KvScales
from tandem.engine.layers.fp8 import FP8_DTYPE, FP8_MAX
from tandem.engine.models.base import Weights
from tandem.engine.models.part import NO_PARTS, Part
from tandem.engine.models.quantization import Quantization
from tandem.engine.weights.fp8 import read_fp8
from tandem.engine.weights.headers import tensor_names
from tandem.engine.weights.kv_scales import ScaleReader
from tandem.engine.weights.resolve import checkpoint_files

# A prime above the number of rows of any matrix, so that no two rows are equal.
_DUMMY_PERIOD = 262_147
_DUMMY_SCALE = 0.02
# Numbers of a part that are made together.
_DUMMY_CHUNK = 2**22
# Every layer adds about the same vector to all tokens. Large embeddings outweigh it, so that tokens stay different and
# choose experts evenly, as floors assume.
_DUMMY_EMBEDDING_SCALE = 8.0
# A projection's inputs seldom exceed 16.
_DUMMY_INPUT_SCALE = 16 / FP8_MAX
_REPORT_INTERVAL_S = 0.1


def load_weights(
    model: Weights,
    model_dir: Path,
    load_format: str,
    quantization: Quantization | None,
    device: torch.device,
    on_progress: Callable[[str], None],
) -> KvScales:
    """Fills a model, tensor by tensor: from the mapped files straight to the device, or made there.

    Args:
        quantization: of the checkpoint, even if the model has plain weights.

    Returns:
        The checkpoint's scales for quantized pages.

    Raises:
        ValueError: the checkpoint is incomplete, corrupt, or of another model.
    """
    scales = ScaleReader(model.config.num_layers)
    if load_format == "dummy":
        _fill_with_dummies(model, device, on_progress)
        return scales.scales()
    num_bytes = sum(path.stat().st_size for path in checkpoint_files(model_dir))
    weights = _reported(checkpoint_weights(model_dir), num_bytes, on_progress)
    weights = scales.without_scales(_own(model, weights))
    if quantization is not None:
        weights = read_fp8(weights, quantization, model, device)
    model.load_weights(weights)
    return scales.scales()


@torch.inference_mode()
def _fill_with_dummies(model: Weights, device: torch.device, on_progress: Callable[[str], None]) -> None:
    parameters = dict(model.stacked_parameters())
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in parameters.items()]
    num_bytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in shapes)
    dummies = dummy_weights(shapes, device=device, parts=model.parts())
    for name, tensor in _reported(dummies, num_bytes, on_progress):
        parameters[name].copy_(tensor)
    model.loaded()


def _own(model: Weights, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if (own_name := model.own_name(name)) is not None:
            yield own_name, tensor


def checkpoint_weights(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a checkpoint's tensors by Hugging Face name, in file order.

    They are views of the memory-mapped files, in their dtype: copy before writing to one.

    Raises:
        ValueError: there are no weights, or a shard is missing, corrupt, or lacks a tensor of the index.
    """
    for path, expected in checkpoint_files(model_dir).items():
        # The file may have changed since the start.
        names = tensor_names(path, expected)
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    if expected is None or name in expected:
                        yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a valid safetensors file: {error}") from error


def dummy_weights(
    shapes: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
    seed: int = 0,
    device: torch.device | str = "cpu",
    parts: Mapping[str, Part] = NO_PARTS,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields random weights for measurements without a checkpoint: outputs are finite, but meaningless.

    Args:
        parts: by name the parts of larger tensors that are yielded instead.

    A whole tensor depends only on its name, shape, dtype and the seed. Vectors are ones, except biases; embeddings are
    uniform in [-8, 8), the rest in [-0.02, 0.02), for FP8 by scale.
    """
    for name, shape, dtype in shapes:
        if name.endswith("_scale"):
            scale = _DUMMY_INPUT_SCALE if name.endswith("input_scale") else _DUMMY_SCALE / FP8_MAX
            yield name, torch.full(shape, scale, dtype=dtype, device=device)
            continue
        if len(shape) == 1 and not name.endswith("bias"):
            yield name, torch.ones(shape, dtype=dtype, device=device)
            continue
        part = parts.get(name)
        count = math.prod(shape if part is None else part.whole)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
        # Large tensors repeat one stretch: drawing billions takes too long.
        of_plain = _DUMMY_EMBEDDING_SCALE if name.endswith("embed_tokens.weight") else _DUMMY_SCALE
        largest = FP8_MAX if dtype is FP8_DTYPE else of_plain
        drawn = torch.empty(min(count, _DUMMY_PERIOD)).uniform_(-largest, largest, generator=generator)
        # On the CPU, for the same numbers on every device.
        stretch = drawn.to(dtype).to(device)
        if dtype is FP8_DTYPE:
            # Not every device can repeat FP8 numbers.
            stretch = stretch.view(torch.uint8)
        if part is None:
            repeated = stretch.repeat(math.ceil(count / len(stretch)))[:count]
        else:
            repeated = _repeated_part(stretch, part)
        yield name, repeated.view(dtype).view(shape)


def _repeated_part(stretch: torch.Tensor, part: Part) -> torch.Tensor:
    """Returns the numbers of a part of a tensor that repeats the stretch, without making the tensor."""
    width = part.whole[-1]
    columns = torch.arange(width, device=stretch.device)[part.columns]
    rows = torch.from_numpy(part.row_indices()).to(stretch.device)
    repeated = stretch.new_empty(len(rows), len(columns))
    num_together = max(1, _DUMMY_CHUNK // max(1, len(columns)))
    for some, held in zip(rows.split(num_together), repeated.split(num_together), strict=True):
        held.copy_(stretch[(some[:, None] * width + columns) % len(stretch)])
    return repeated.flatten()


def _reported(
    weights: Iterable[tuple[str, torch.Tensor]], num_bytes: int, on_progress: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor counts as loaded when the next one is requested."""
    num_loaded, reported_at = 0, -math.inf
    for name, tensor in weights:
        if (now := time.monotonic()) - reported_at >= _REPORT_INTERVAL_S:
            reported_at = now
            on_progress(f"loading weights ({num_loaded / 1e9:.2f} of {num_bytes / 1e9:.2f} GB)")
        yield name, tensor
        num_loaded += tensor.nbytes
