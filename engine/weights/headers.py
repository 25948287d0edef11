"""Checks safetensors headers before use. Imports no torch."""

import json
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

# 48 layers of 128 FP8 experts have 56,000 tensors of about 115 bytes, and larger models have several files. Longer
# headers are not read, because parsing takes many times their length in memory.
MAX_HEADER_BYTES = 8 * 2**20
_LENGTH_BYTES = 8
_MAX_FILE_BYTES = 2**63 - 1
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# Messages quote file content, which may be long, nested, or of several lines.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class TensorPlace(NamedTuple):
    """
    Attributes:
        dtype: by safetensors' name, like BF16.
        begin, end: of its data, in bytes from the beginning of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """Returns the tensors of a safetensors file, in file order. Raises ValueError as tensor_names."""
    with _naming(path):
        header, num_data_bytes = _read(path)
        ends = _checked_spans(header, num_data_bytes)
        first = path.stat().st_size - num_data_bytes
        return {
            name: TensorPlace(header[name]["dtype"], tuple(header[name]["shape"]), first + begin, first + end)
            for name, (begin, end) in ends.items()
        }


def tensor_names(path: Path, expected: frozenset[str] | None = None) -> list[str]:
    """Returns a safetensors file's tensors in file order.

    Args:
        expected: tensors that the file must hold; None: any.

    Raises:
        ValueError: the file cannot be read, is malformed or lacks a tensor. The message, of one line, names the file
            and the tensor, if any.
    """
    with _naming(path):
        names = list(_checked_spans(*_read(path)))
    if expected is not None and (missing := expected.difference(names)):
        raise ValueError(f"{path} lacks {len(missing)} tensors, for example {_SHORT.repr(min(missing))}")
    return names


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Names the file in errors."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from error


def _checked_spans(header: dict[str, Any], num_data_bytes: int) -> dict[str, tuple[int, int]]:
    """Returns where each tensor's data begin and end, in file order."""
    spans = {name: _checked(name, info) for name, info in header.items()}
    in_order = dict(sorted(spans.items(), key=lambda named: named[1]))
    _check_covers([(name, *span) for name, span in in_order.items()], num_data_bytes)
    return in_order


def _read(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_LENGTH_BYTES)
        if len(prefix) < _LENGTH_BYTES:
            raise ValueError(f"it has {size} bytes, too few for the length of a header")
        length = int.from_bytes(prefix, "little")
        if length > size - _LENGTH_BYTES:
            raise ValueError(f"its header is longer than the file: {length} bytes")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes, more than {MAX_HEADER_BYTES}")
        content = file.read(length)
    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError("its header is nested too deep") from error
    if not isinstance(header, dict):
        raise ValueError(f"its header must be an object, not {_SHORT.repr(header)}")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} must be an object of strings, not {_SHORT.repr(metadata)}")
    return header, size - _LENGTH_BYTES - length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in the value they take for a duplicate name."""
    content = dict(pairs)
    if len(content) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_SHORT.repr(name)} comes twice in its header")
    return content


def _checked(name: str, info: Any) -> tuple[int, int]:
    try:
        return _span(info)
    except ValueError as error:
        raise ValueError(f"tensor {_SHORT.repr(name)} {error}") from error


def _span(info: Any) -> tuple[int, int]:
    """Returns where a tensor's data begin and end. Raises ValueError that continues "tensor X"."""
    if not isinstance(info, dict) or set(info) != _FIELDS:
        raise ValueError(f"must have dtype, shape and data_offsets, but is {_SHORT.repr(info)}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ValueError(f"has dtype {_SHORT.repr(dtype)}, which is not known")
    if not _are_counts(shape):
        raise ValueError(f"has shape {_SHORT.repr(shape)}, not whole numbers of at least 0")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"has data_offsets {_SHORT.repr(offsets)}, not two whole numbers, where it begins and where it ends"
        )
    begin, end = offsets
    num_bytes = _DTYPE_BYTES[dtype]
    for size in shape:
        num_bytes *= size
        if num_bytes > _MAX_FILE_BYTES:
            raise ValueError(f"has shape {_SHORT.repr(shape)}, which no file has room for")
    if num_bytes != end - begin:
        raise ValueError(
            f"of shape {_SHORT.repr(shape)} and dtype {dtype} takes {num_bytes} bytes, but has data_offsets "
            f"{_SHORT.repr(offsets)}"
        )
    return begin, end


def _are_counts(values: Any) -> bool:
    # type(): bool is an int in Python.
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_covers(tensors: Iterable[tuple[str, int, int]], num_data_bytes: int) -> None:
    """Refuses overlaps, gaps, and tensors that do not end with the file."""
    in_order = [("", 0, 0), *tensors]
    for (before, _, ends), (name, begins, _) in pairwise(in_order):
        if begins < ends:
            raise ValueError(f"tensors {_SHORT.repr(before)} and {_SHORT.repr(name)} overlap")
        if begins > ends:
            raise ValueError(f"{begins - ends} bytes before tensor {_SHORT.repr(name)} belong to no tensor")
    name, _, ends = in_order[-1]
    if ends > num_data_bytes:
        raise ValueError(f"tensor {_SHORT.repr(name)} ends {ends - num_data_bytes} bytes beyond the end of the file")
    if ends < num_data_bytes:
        raise ValueError(f"{num_data_bytes - ends} bytes at its end belong to no tensor")
