from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# Kernels are compiled for pointers that are multiples of 16, and again for others.
ALIGNMENT = 16

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64}

Numbers = np.ndarray[Any, np.dtype[np.int32] | np.dtype[np.int64] | np.dtype[np.float64]]


class Packed:
    """Arrays packed into one memory, each at a multiple of ALIGNMENT.

    Each copy to a GPU has its own pinned memory, because an earlier step's copy may not have begun.
    """

    def __init__(self, *arrays: Numbers) -> None:
        """Args: arrays: one-dimensional, int32, int64 or float64."""
        self._arrays = arrays
        self._offsets: list[int] = []
        self.num_bytes = 0
        for numbers in arrays:
            self._offsets.append(self.num_bytes)
            self.num_bytes += aligned(numbers.nbytes)

    def to(self, device: torch.device) -> list[torch.Tensor]:
        memory = self._on_host(pinned=device.type == "cuda").to(device, non_blocking=True)
        return [view[: len(numbers)] for view, numbers in zip(self.views(memory), self._arrays, strict=True)]

    def copy_to(self, memory: torch.Tensor) -> None:
        memory[: self.num_bytes].copy_(self._on_host(pinned=True), non_blocking=True)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Views of the arrays in `memory`, (at least num_bytes,) uint8."""
        ends = [offset + numbers.nbytes for offset, numbers in zip(self._offsets, self._arrays, strict=True)]
        ends[-1] = len(memory)
        return [
            memory[offset:end].view(_DTYPES[numbers.dtype])
            for offset, end, numbers in zip(self._offsets, ends, self._arrays, strict=True)
        ]

    def _on_host(self, *, pinned: bool) -> torch.Tensor:
        host = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        memory = host.numpy()
        for offset, numbers in zip(self._offsets, self._arrays, strict=True):
            memory[offset : offset + numbers.nbytes] = numbers.view(np.uint8)
        return host


def to_device(values: Sequence[int] | Numbers, device: torch.device) -> torch.Tensor:
    """Uploads without waiting: an array in its own dtype, a list as int64."""
    numbers = values if isinstance(values, np.ndarray) else np.array(values, np.int64)
    return Packed(numbers).to(device)[0]


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
