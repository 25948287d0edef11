"""Histograms for one thread. Every token observes a gap, and a thread-safe histogram would cost as much as passing the
token on."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_STEPS = (1e-4, 2.5e-4, 5e-4)
# For local CPU models and fast GPUs.
PHASE_SECONDS = tuple(round(step * 10**power, 7) for power in range(7) for step in _STEPS if step * 10**power <= 500)
# Dense around usual ITL objectives, for exact quantiles near one.
ITL_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),
    *(0.01, 0.012, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
TTFT_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
E2E_SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 3600.0),
)
# Actual value divided by expected value.
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
TOKENS = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5) if step * 10**power <= 1_000_000)


class Histogram:
    """Counts of values by size.

    Attributes:
        bounds: upper bounds of the buckets, rising.
    """

    def __init__(self, name: str, buckets: Sequence[float], labels: str = "") -> None:
        self.bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        before = f"{labels}," if labels else ""
        self._line_heads = [f'{name}_bucket{{{before}le="{bound}"}} ' for bound in (*buckets, "+Inf")]
        own = f"{{{labels}}}" if labels else ""
        self._sum_head, self._count_head = f"{name}_sum{own} ", f"{name}_count{own} "

    def observe(self, value: float, num_times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += num_times
        self._sum += num_times * value

    def counts(self) -> tuple[int, ...]:
        """Returns the values per bucket, not cumulative, then the values above all bounds."""
        return tuple(self._counts)

    def samples(self) -> str:
        totals = list(accumulate(self._counts))
        buckets = "".join([f"{head}{total}\n" for head, total in zip(self._line_heads, totals, strict=True)])
        return f"{buckets}{self._count_head}{totals[-1]}\n{self._sum_head}{self._sum!r}\n"


class HistogramFamily:
    def __init__(
        self, name: str, text: str, buckets: Sequence[float], label: str = "", values: Sequence[str] = ()
    ) -> None:
        self._head = f"# HELP {name} {text}\n# TYPE {name} histogram\n"
        of = [f'{label}="{value}"' for value in values] or [""]
        keys = values or [""]
        self.by_value = {key: Histogram(name, buckets, labels) for key, labels in zip(keys, of, strict=True)}

    @property
    def only(self) -> Histogram:
        """The histogram of a metric without a label."""
        return self.by_value[""]

    def exposition(self) -> str:
        return self._head + "".join([histogram.samples() for histogram in self.by_value.values()])
