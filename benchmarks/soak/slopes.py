"""Slopes of measured values over time, with their intervals, and the rule that calls them flat."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# 97.5th percentile of the normal distribution.
_Z = 1.959964
# Of neighbouring residuals. Above it a series says little more than its first and last value.
_MAX_CORRELATION = 0.98
_MIN_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Series:
    """One value of one process over its life. Attributes: times_s: increasing."""

    times_s: Sequence[float]
    values: Sequence[float]

    @property
    def duration_s(self) -> float:
        return self.times_s[-1] - self.times_s[0] if len(self.times_s) else 0.0


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour.

    Attributes:
        low, high: its 95 % confidence interval.
        num_lives: of the processes.
        per_step: slope per hour of a single step by 1, midway in each life.
    """

    per_hour: float
    low: float
    high: float
    num_lives: int
    num_samples: int
    per_step: float

    def is_flat(self, bound: float) -> bool:
        """Return whether 0 is within the interval or below it, or the growth is at most `bound` per hour."""
        return self.low <= 0.0 or self.per_hour <= bound


def common_slope(lives: Sequence[Series]) -> Slope | None:
    """Fit one slope to all lives by least squares, each with its own mean; None if they have too few samples.

    Neighbouring samples are not independent. So the interval is widened by the correlation of neighbouring residuals,
    as for a first-order autoregressive process, and takes Student's distribution.
    """
    lives = [life for life in lives if len(life.times_s) >= _MIN_SAMPLES]
    if not lives:
        return None
    times = [np.asarray(life.times_s) - np.mean(life.times_s) for life in lives]
    values = [np.asarray(life.values, dtype=float) - np.mean(life.values) for life in lives]
    spread = sum(float(t @ t) for t in times)
    slope = sum(float(t @ v) for t, v in zip(times, values, strict=True)) / spread
    residuals = [v - slope * t for t, v in zip(times, values, strict=True)]
    num_samples = sum(len(r) for r in residuals)
    freedom = num_samples - len(lives) - 1
    squares = sum(float(r @ r) for r in residuals)
    correlation = sum(float(r[1:] @ r[:-1]) for r in residuals) / squares if squares else 0.0
    correlation = min(max(correlation, 0.0), _MAX_CORRELATION)
    error = math.sqrt(squares / freedom / spread * (1 + correlation) / (1 - correlation))
    effective = max(1.0, freedom * (1 - correlation) / (1 + correlation))
    half = student_quantile(effective) * error
    # Least squares make a step by 1, midway in n samples over a time T, a slope of 1.5 / T.
    per_step = sum(0.5 * float(np.abs(t).sum()) for t in times) / spread
    return Slope(slope * 3600, (slope - half) * 3600, (slope + half) * 3600, len(lives), num_samples, per_step * 3600)


def student_quantile(freedom: float) -> float:
    """Return the 97.5th percentile of Student's distribution, within 1 % from 2 degrees of freedom on."""
    if freedom < 2:
        # Between 1 and 2 degrees, on the safe side.
        return 12.71
    # Abramowitz and Stegun, 26.7.5.
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
