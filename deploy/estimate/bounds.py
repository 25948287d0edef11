"""Bounds of a cluster that sizes itself for a trace, and its time beside a fixed number of workers.

docs/estimate.md explains the rules.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from tandem.deploy.estimate.rates import Load, best_rates, largest_batch, prefill_s, steps_for_one, ttft_alone_s
from tandem.deploy.estimate.reuse import prompt_of
from tandem.deploy.estimate.worker import Worker

WINDOW_S = 60.0
# Seconds without a request after which a cluster with the lower bound 0 has no worker, and seconds until one of several
# workers leaves (deploy/supervise/size_planner.py).
IDLE_S = 300.0
HOLD_S = 60.0
# Share of requests that arrive in windows with enough workers.
SERVED_SHARE = 0.95
MAX_WORKERS = 64
MAX_START_S = 3600.0
# If so many workers serve nothing, no number does.
SEVERAL = 4
# Prompts' work is computed once for lengths up to the next multiple.
ROUNDED_TOKENS = 64


class Arrival(NamedTuple):
    at_s: float
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """Numbers of workers over a trace.

    Attributes:
        low, high: bounds; equal for a fixed number.
        worker_s: seconds of all workers, those that start included.
        served_share: share of requests that enough workers serve.
    """

    low: int
    high: int
    worker_s: float
    served_share: float


@dataclass(frozen=True, slots=True)
class TraceNeeds:
    """Needed workers by window.

    Attributes:
        rates: requests/s that 1, 2, ... workers serve.
        needs: workers that serve each window's requests.
        demands: mean requests per second, by window, weighted by their work.
        counts: requests by window.
    """

    rates: Sequence[float]
    needs: Sequence[int]
    demands: Sequence[float]
    counts: Sequence[int]

    def fixed(self) -> Sizing:
        """Returns the fewest workers that serve SERVED_SHARE."""
        return next(
            sizing
            for count in range(1, max(self.needs) + 1)
            if (sizing := self._sized(count, count, self.needs)).served_share >= SERVED_SHARE
        )

    def cheapest(self, start_s: float) -> Sizing:
        """Returns the bounds of least time that serve SERVED_SHARE.

        Args:
            start_s: time that a worker takes to start.
        """
        wanted = self._wanted(start_s)
        lag = _windows(start_s)
        found: list[Sizing] = []
        most = max(self.needs)
        # A fixed number that serves all is the last candidate.
        for low in range(most + 1):
            for high in range(most, max(low, 1) - 1, -1):
                sizing = self._sized(low, high, wanted, lag)
                if sizing.served_share < SERVED_SHARE:
                    break
                found.append(sizing)
        return min(found, key=lambda sizing: (sizing.worker_s, -sizing.served_share))

    def _wanted(self, start_s: float) -> list[int]:
        """Returns the planned workers by window: the most that an earlier window needed, as far as it is known."""
        lag, hold = _windows(start_s), _windows(max(HOLD_S, 2 * start_s))
        wanted = []
        for index in range(len(self.needs)):
            until = max(0, index - lag + 1)
            recent = max(self.needs[max(0, until - hold - 1) : until], default=0)
            wanted.append(max(recent, int(any(self.needs[max(0, until - _windows(IDLE_S) - 1) : until]))))
        return wanted

    def _sized(self, low: int, high: int, wanted: Sequence[int], lag: int = 0) -> Sizing:
        counts = [min(high, max(low, count)) for count in wanted]
        served = 0.0
        for workers, demand, number in zip(counts, self.demands, self.counts, strict=True):
            rate = self.rates[workers - 1] if workers else 0.0
            served += number * min(1.0, rate / demand) if demand else 0.0
        # A worker counts from its order.
        held = (max(counts[index : index + lag + 1]) for index in range(len(counts)))
        return Sizing(low, high, WINDOW_S * sum(held), served / sum(self.counts))


def mean_of(arrivals: Sequence[Arrival]) -> tuple[int, int]:
    """Returns the mean tokens of prompts and of outputs, rounded."""
    number = len(arrivals)
    return (
        round(sum(arrival.prompt_len for arrival in arrivals) / number),
        round(sum(arrival.output_len for arrival in arrivals) / number),
    )


def needs_of(worker: Worker, load: Load, arrivals: Sequence[Arrival]) -> TraceNeeds:
    """Returns the needs of a trace. A window's requests count as mean requests of the same work.

    Args:
        load: of the mean request.
        arrivals: the first is at 0.

    Raises:
        ValueError: MAX_WORKERS do not serve each window.
    """
    num_windows = int(max(arrival.at_s for arrival in arrivals) // WINDOW_S) + 1
    counts, work = [0] * num_windows, [0.0] * num_windows
    work_of = _RequestWork(worker, load)
    for arrival in arrivals:
        window = int(arrival.at_s // WINDOW_S)
        counts[window] += 1
        work[window] += work_of(arrival)
    mean = sum(work) / len(arrivals)
    demands = [total / mean / WINDOW_S for total in work]
    rates: list[float] = []
    more = best_rates(worker, load)
    while not rates or rates[-1] < max(demands):
        if len(rates) == SEVERAL and not rates[-1]:
            prompt_s, step_s = ttft_alone_s(worker, load), worker.decode_step(1, load.kv_len)
            raise ValueError(
                f"--slo is too strict for any number of workers: alone, the mean request's prompt of {load.prompt_len} "
                f"tokens takes {prompt_s * 1e3:.1f} ms (ttft) and a decode step {step_s * 1e3:.2f} ms (itl)"
            )
        if len(rates) == MAX_WORKERS:
            raise ValueError(
                f"{len(rates)} workers serve {rates[-1]:.1f} mean requests a second, and the trace has up to "
                f"{max(demands):.1f} in a minute: raise the limits of --slo, or lower the load with --time-scale"
            )
        rates.append(next(more))
    return TraceNeeds(rates, [bisect_left(rates, demand) + 1 if demand else 0 for demand in demands], demands, counts)


class _RequestWork:
    """Seconds of a worker that one request takes: its prompt alone, and its share of full decode steps."""

    def __init__(self, worker: Worker, load: Load) -> None:
        self._worker = worker
        self._hit_rate = load.hit_rate
        batch_size = max(1, largest_batch(worker, load))
        step_s = worker.decode_step(batch_size, load.kv_len) * steps_for_one(worker, load, batch_size)
        self._token_s = step_s / batch_size / (1 + load.num_accepted)
        self._prompt_s: dict[int, float] = {}

    def __call__(self, arrival: Arrival) -> float:
        rounded = -(-arrival.prompt_len // ROUNDED_TOKENS) * ROUNDED_TOKENS
        if rounded not in self._prompt_s:
            self._prompt_s[rounded] = prefill_s(self._worker, prompt_of(self._worker, rounded, self._hit_rate, 0.0))
        return self._prompt_s[rounded] + arrival.output_len * self._token_s


def _windows(seconds: float) -> int:
    return ceil(seconds / WINDOW_S)
