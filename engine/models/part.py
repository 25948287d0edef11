"""The part of a checkpoint's tensor that a rank holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

# The held indices of an axis, in the order in which they are held; None: all.
Ranges = tuple[range, ...] | None
Int64s = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Part:
    """The place of a held tensor in the whole one.

    Attributes:
        whole: shape of the whole tensor.
        ranges: the held indices of each axis.
    """

    whole: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        assert len(self.whole) == len(self.ranges)

    @property
    def is_whole(self) -> bool:
        return all(ranges is None for ranges in self.ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            size if ranges is None else sum(map(len, ranges))
            for size, ranges in zip(self.whole, self.ranges, strict=True)
        )

    @property
    def columns(self) -> slice:
        """The held columns. Those of a matrix are never in several pieces."""
        ranges = self.ranges[-1]
        if ranges is None:
            return slice(0, self.whole[-1])
        (columns,) = ranges
        return slice(columns.start, columns.stop)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the part of a tensor of shape `whole`: a view, unless an axis is held in several pieces."""
        assert tensor.shape == self.whole
        for axis, ranges in enumerate(self.ranges):
            if ranges is not None:
                pieces = [tensor.narrow(axis, held.start, len(held)) for held in ranges]
                tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return tensor

    def row_indices(self) -> Int64s:
        """Returns the index in the whole of each held row, if both are flattened to matrices. A vector is one row."""
        rows = np.zeros(1, np.int64)
        for size, ranges in zip(self.whole[:-1], self.ranges[:-1], strict=True):
            rows = (rows[:, None] * size + _indices(size, ranges)[None, :]).ravel()
        return rows


def _indices(size: int, ranges: Iterable[range] | None) -> Int64s:
    return np.arange(size) if ranges is None else np.concatenate([np.arange(r.start, r.stop) for r in ranges])


# Of whole models.
NO_PARTS: Mapping[str, Part] = MappingProxyType({})
