"""Weights by name: from a checkpoint's safetensors files, or made up."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.weights.resolve import checkpoint_files

# A prime, so that no two rows of a tiled matrix come out equal.
_DUMMY_PERIOD = 1_048_583
_DUMMY_SCALE = 0.02


def checkpoint_weights(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, by its Hugging Face name, in the order it lies on disk.

    The tensors are views of the memory-mapped files, in their dtype: copy before writing to one. Nothing is
    read from disk before it is used.

    Raises:
        ValueError: there are no weights, a shard is missing or corrupt, or lacks a tensor the index names.
    """
    for path, expected in checkpoint_files(model_dir).items():
        try:
            with safe_open(path, framework="pt") as file:
                names = file.offset_keys()
                if expected is not None and (missing := expected.difference(names)):
                    raise ValueError(f"{path} lacks {len(missing)} tensors, for example {min(missing)}")
                for name in names:
                    # A shard may hold a tensor that the index takes from another.
                    if expected is None or name in expected:
                        yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a valid safetensors file: {error}") from error


def dummy_weights(
    shapes: Iterable[tuple[str, tuple[int, ...], torch.dtype]], seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights for measuring without a checkpoint: a forward pass stays finite, the output means nothing.

    A tensor depends on its name, shape and dtype and the seed alone, so every process makes the same ones
    in whatever order. Vectors are ones (norms) unless they are biases; the rest is uniform in [-0.02, 0.02).
    """
    for name, shape, dtype in shapes:
        if len(shape) == 1 and not name.endswith("bias"):
            yield name, torch.ones(shape, dtype=dtype)
            continue
        count = math.prod(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
        # Large tensors repeat one stretch of numbers: drawing billions would take longer than any benchmark.
        drawn = torch.rand(min(count, _DUMMY_PERIOD), generator=generator)
        stretch = ((2 * drawn - 1) * _DUMMY_SCALE).to(dtype)
        yield name, stretch.repeat(math.ceil(count / len(stretch)))[:count].view(shape)
