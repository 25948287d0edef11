"""Checks a GGUF file's header before use, as the gguf package believes it.

The package makes several Python objects for each item of an array, so a header of some megabytes may take gigabytes.
"""

import math
import mmap
import reprlib
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

# Llama 4, with the largest vocabulary of the supported tokenizers, has 0.8 million.
MAX_ARRAY_ITEMS = 2**21
MAX_FIELDS = 2**12
# The largest Llama has 1,200.
MAX_TENSORS = 2**14
MAX_NAME_BYTES = 2**10
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_SCALAR_BYTES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}


def check_header(path: Path) -> None:
    """Raises ValueError, with a message of one line: the file is malformed, its header is larger than any model's, or
    its tensors overlap or do not fit into it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Header(content).check()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


class _Header:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0
        self._num_items = 0
        self._alignment = DEFAULT_ALIGNMENT

    def check(self) -> None:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it is not a GGUF file")
        if (version := self._number("<I")) not in _VERSIONS:
            raise ValueError(f"its format has version {version}; read are {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        for what, number, most in (("tensors", num_tensors, MAX_TENSORS), ("metadata keys", num_fields, MAX_FIELDS)):
            if number > most:
                raise ValueError(f"it has {number} {what}, more than {most}")
        for _ in range(num_fields):
            self._skip_field()
        tensors = [self._tensor() for _ in range(num_tensors)]
        begin = -(-self._at // self._alignment) * self._alignment
        self._check_data(tensors, len(self._content) - begin)

    def _skip_field(self) -> None:
        name = self._name("a metadata key")
        kind = self._kind(name)
        if kind is GGUFValueType.ARRAY:
            self._skip_array(name)
        elif name == _ALIGNMENT_KEY:
            alignment = self._number("<I") if kind is GGUFValueType.UINT32 else 0
            if alignment < 1 or alignment.bit_count() != 1 or alignment > mmap.PAGESIZE:
                raise ValueError(f"{name} must be a power of two of at most {mmap.PAGESIZE}, as a 32-bit number")
            self._alignment = alignment
        else:
            self._skip_value(kind)

    def _skip_array(self, name: str) -> None:
        kind, length = self._kind(name), self._number("<Q")
        if kind is GGUFValueType.ARRAY:
            raise ValueError(f"{name} is a list of lists")
        self._num_items += length
        if self._num_items > MAX_ARRAY_ITEMS:
            raise ValueError(f"{name} has {length} items; all lists together may have {MAX_ARRAY_ITEMS}")
        if kind is GGUFValueType.STRING:
            for _ in range(length):
                self._skip_value(kind)
        else:
            self._skip(length * _SCALAR_BYTES[kind])

    def _skip_value(self, kind: GGUFValueType) -> None:
        self._skip(self._number("<Q") if kind is GGUFValueType.STRING else _SCALAR_BYTES[kind])

    def _tensor(self) -> tuple[int, int, str]:
        """Returns where it begins and ends in the data, and its name."""
        name = self._name("a tensor's name")
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {_shown(name)} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = [self._number("<Q") for _ in range(num_dimensions)]
        number = self._number("<I")
        try:
            block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
        except (ValueError, KeyError) as error:
            raise ValueError(f"tensor {_shown(name)} has quantisation {number}, which is unknown") from error
        if not all(shape) or shape[0] % block_size:
            raise ValueError(
                f"tensor {_shown(name)} has shape {shape}, not in blocks of {block_size} numbers of its first dimension"
            )
        begin = self._number("<Q")
        if begin % self._alignment:
            raise ValueError(f"tensor {_shown(name)} begins at {begin}, no multiple of the alignment {self._alignment}")
        return begin, begin + math.prod(shape) // block_size * block_bytes, name

    def _check_data(self, tensors: Sequence[tuple[int, int, str]], num_bytes: int) -> None:
        in_order = sorted(tensors)
        for (_, ends, name), (begins, _, following) in pairwise(in_order):
            if begins < ends:
                raise ValueError(f"tensors {_shown(name)} and {_shown(following)} overlap")
        if in_order and in_order[-1][1] > num_bytes:
            _, ends, name = in_order[-1]
            raise ValueError(
                f"it is truncated: tensor {_shown(name)} ends {ends - num_bytes} bytes beyond the end of the file"
            )

    def _kind(self, name: str) -> GGUFValueType:
        number = self._number("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise ValueError(f"{_shown(name)} has type {number}, which is unknown") from error

    def _name(self, what: str) -> str:
        num_bytes = self._number("<Q")
        if num_bytes > MAX_NAME_BYTES:
            raise ValueError(f"{what} has {num_bytes} bytes, more than {MAX_NAME_BYTES}")
        return self._bytes(num_bytes).decode()

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return int(number)

    def _bytes(self, num_bytes: int) -> bytes:
        begin = self._at
        self._skip(num_bytes)
        return self._content[begin : self._at]

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > len(self._content):
            raise ValueError("it is truncated: it ends within its header")


def _shown(text: str) -> str:
    return reprlib.repr(text)
