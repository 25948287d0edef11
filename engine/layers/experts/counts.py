"""Counters of the tokens that each expert computes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Of staged_rows, int64.
NUM_STAGED = 3
_EVERY_ROW = (2**31 - 1, 0, 0)


class LayerCounts:
    """Counters of one layer.

    Attributes:
        counts: (num_experts,) int64; routing adds the number of rows that chose each expert.
        counted_rows: (3,) int32 on the device. Rows below the first number count, and rows from the second on below the
            third.
    """

    def __init__(self, counts: torch.Tensor, counted_rows: torch.Tensor) -> None:
        self.counts = counts
        self.counted_rows = counted_rows

    def add(self, experts: torch.Tensor) -> None:
        """Counts rows in plain torch, as kernels must. Waits for the device. Args: experts: (num_rows, num_chosen)
        int64."""
        first_end, begin, end = self.counted_rows.tolist()
        counted = experts[:first_end]
        if begin < end:
            counted = torch.cat((counted, experts[begin:end]))
        self.counts += torch.bincount(counted.flatten(), minlength=len(self.counts))


class ExpertCounts:
    """Counters of a model since the last reset.

    Forward passes count all rows, unless they are launched under `only`.

    Attributes:
        layers: the layers with experts, ascending.
        counts: (len(layers), num_experts) int64 on the device.
        is_last_whole: True if the last layer computes all tokens, not selected rows alone.
    """

    is_last_whole = False

    def __init__(self, layers: Sequence[int], num_experts: int, num_layers: int, device: torch.device) -> None:
        """Args: num_layers: of the model, dense ones included."""
        self.layers = tuple(layers)
        self.counts = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        every_row = torch.tensor(_EVERY_ROW, dtype=torch.int32, device=device)
        self._by_layer = {
            layer: LayerCounts(counts, every_row) for layer, counts in zip(layers, self.counts, strict=True)
        }
        self._last_layer = num_layers - 1

    def of_layer(self, layer: int) -> LayerCounts | None:
        """Returns None for a dense layer."""
        return self._by_layer.get(layer)

    def reset(self) -> None:
        self.counts.zero_()

    @contextmanager
    def only(self, staged: torch.Tensor) -> Iterator[None]:
        """Lets forward passes launched meanwhile, or captured, count these rows alone.

        Args:
            staged: (NUM_STAGED,) int64, staged_rows on the device. Read while a forward pass runs.
        """
        tokens, rows = staged.view(torch.int32).chunk(2)
        before = {layer: of_layer.counted_rows for layer, of_layer in self._by_layer.items()}
        for layer, of_layer in self._by_layer.items():
            is_selected = layer == self._last_layer and not self.is_last_whole
            of_layer.counted_rows = rows if is_selected else tokens
        try:
            yield
        finally:
            for layer, of_layer in self._by_layer.items():
                of_layer.counted_rows = before[layer]


def staged_rows(num_tokens: int, num_rows: int, later: range = range(0)) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Returns the rows of a padded forward pass that count, as numbers for `ExpertCounts.only`: (NUM_STAGED,).

    Args:
        num_tokens: tokens before the first padding.
        num_rows: rows of the last layer before its padding.
        later: further tokens, behind padding.
    """
    return np.array([num_tokens, later.start, later.stop, num_rows, 0, 0], np.int32).view(np.int64)
