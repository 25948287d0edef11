"""Writes a safetensors file tensor by tensor, so that memory holds one at a time."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

_ITEM_BYTES = 4
_ALIGNMENT = 8


def num_data_bytes(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) * _ITEM_BYTES for shape in shapes)


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[np.ndarray]) -> None:
    """Writes float32 tensors.

    Args:
        shapes: of the tensors, by name.
        tensors: one for each shape, in the same order; requested one after another.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + num_data_bytes([shape])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape, tensor in zip(shapes.values(), tensors, strict=True):
            assert tensor.shape == shape
            file.write(np.ascontiguousarray(tensor, dtype="<f4").data)
