"""Reads the counters of experts off the steps' path: how unevenly tokens spread over the experts of a layer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.layers.experts.counts import ExpertCounts

READ_INTERVAL_S = 2.0
# Bounds the number of exported series.
MAX_GROUPS = 8
# Tokens per expert between two observations of a layer. With fewer, chance alone looks unbalanced: the largest of 128
# Poisson counts with mean 100 is about 1.27 times the mean.
MIN_MEAN = 100
# Upper bounds of the histogram's buckets.
BOUNDS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class GroupBalance:
    """Observations of consecutive layers with experts since the start.

    An observation is a layer's imbalance: tokens of the busiest expert over the mean of all experts, at least 1.

    Attributes:
        layers: the first and the last layer, as "0-11".
        num_tokens: tokens that each expert computed, summed over experts and layers.
        num_within: observations up to each of BOUNDS, then all.
        total: sum of all observations.
    """

    layers: str
    num_tokens: int
    num_within: tuple[int, ...]
    total: float


class ExpertBalance:
    """
    Attributes:
        groups: replaced as a whole; readable on any thread.
    """

    def __init__(self, counts: ExpertCounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts.counts
        self._clock = clock
        self._due = clock() + READ_INTERVAL_S
        is_cuda = self._counts.is_cuda
        self._host = torch.zeros_like(self._counts, device="cpu", pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._is_copying = False
        groups = np.array_split(counts.layers, min(MAX_GROUPS, len(counts.layers)))
        self._labels = [f"{layers[0]}-{layers[-1]}" for layers in groups]
        self._group_of = np.repeat(np.arange(len(groups)), [len(layers) for layers in groups])
        # Counts at each layer's last observation.
        self._observed = np.zeros(self._counts.shape, np.int64)
        self._num_in_bucket = np.zeros((len(groups), len(BOUNDS) + 1), np.int64)
        self._totals = np.zeros(len(groups))
        self.groups: Sequence[GroupBalance] = ()
        self._take()

    def poll(self) -> None:
        """Starts a copy of the counters when one is due, and takes a copy that has ended. Call between steps, on the
        thread that launches them. Never waits for the device."""
        if self._is_copying:
            if self._copied is None or self._copied.query():
                self._is_copying = False
                self._take()
        elif self._clock() >= self._due:
            self._due = self._clock() + READ_INTERVAL_S
            self._is_copying = True
            self._host.copy_(self._counts, non_blocking=True)
            if self._copied is not None:
                self._copied.record()

    def _take(self) -> None:
        counts = self._host.numpy()  # (num_layers, num_experts)
        grown = counts - self._observed
        mean = grown.mean(axis=1)
        (enough,) = (mean >= MIN_MEAN).nonzero()
        imbalance = grown[enough].max(axis=1) / mean[enough]
        self._observed[enough] = counts[enough]
        # Several layers may add to one bucket.
        np.add.at(self._num_in_bucket, (self._group_of[enough], np.searchsorted(BOUNDS, imbalance)), 1)
        np.add.at(self._totals, self._group_of[enough], imbalance)
        num_tokens = np.bincount(self._group_of, counts.sum(axis=1))
        num_within = self._num_in_bucket.cumsum(axis=1)
        self.groups = tuple(
            GroupBalance(label, int(num_tokens[group]), tuple(num_within[group].tolist()), float(self._totals[group]))
            for group, label in enumerate(self._labels)
        )
