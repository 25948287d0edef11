"""Random numbers as a function of a request's seed and a position.

No generator state has to survive a handover or a restart.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) with 53 random bits.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) at step `position`. The
    seed is mixed first: otherwise seeds that differ by a multiple of the increment would give overlapping numbers.

    Args:
        seed: 64 bits.
        position: index of the token in the whole sequence, prompt included.
    """
    return (_mix(_mix(seed) + position * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def uniforms(
    seeds: Sequence[int], positions: "np.ndarray[Any, np.dtype[np.int64]]"
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Returns `uniform` of each seed and position. Args: positions: (..., len(seeds)), as the result."""
    state = _mixed(np.array(seeds, np.uint64)) + positions.astype(np.uint64) * np.uint64(_GOLDEN_GAMMA)
    return (_mixed(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + _GOLDEN_GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mixed(values: "np.ndarray[Any, np.dtype[np.uint64]]") -> "np.ndarray[Any, np.dtype[np.uint64]]":
    values = values + np.uint64(_GOLDEN_GAMMA)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
