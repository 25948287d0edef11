"""How many requests a second a number of GPUs serves well, for each way to share them out.

Arrivals are independent of each other (Poisson), and all requests have the same lengths. docs/estimate.md has the
formulas.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from tandem.config import Role
from tandem.deploy.estimate.both import BothSteps
from tandem.deploy.estimate.queueing import Running, highest, late
from tandem.deploy.estimate.worker import Worker

# More GPUs are not looked at.
MAX_GPUS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and what is promised for them.

    Attributes:
        prompt_len, output_len: tokens of each request; none of the prompt is cached.
        ttft, itl: limits in seconds: until the first token, and between tokens; inf: none.
        good_share: of the requests, that must have their first token in time and 19 in 20 of their gaps within `itl`.

    Raises:
        ValueError: on construction, for numbers that make no load.
    """

    prompt_len: int
    output_len: int
    ttft: float = inf
    itl: float = inf
    good_share: float = 0.9

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or self.output_len < 1:
            raise ValueError("a workload has at least one prompt token and one output token")
        if not (self.ttft > 0 and self.itl > 0):
            raise ValueError("limits on ttft and itl must be above 0")
        if not 0 < self.good_share < 1:
            raise ValueError(f"the share of good requests must be between 0 and 1, not {self.good_share:g}")

    @property
    def num_tokens(self) -> int:
        """Of a whole request."""
        return self.prompt_len + self.output_len

    @property
    def kv_len(self) -> int:
        """Tokens of a sequence in the middle of its output."""
        return self.prompt_len + self.output_len // 2


@dataclass(frozen=True, slots=True)
class Split:
    """One way to share GPUs out, and what it gives.

    Attributes:
        num_both: workers of role both; where there are any, there are no others.
        rate: requests per second that are served within the limits; 0: not even one is.
        bottleneck: "prefill", "decode" or "both".
        batch_size: sequences that each worker decodes at once at that rate, in the mean.
        chunk_size: tokens of a prefill forward, or of what a worker of role both computes of a prompt with a step.
    """

    num_prefill: int
    num_decode: int
    num_both: int
    rate: float
    bottleneck: str
    batch_size: int
    chunk_size: int

    def __str__(self) -> str:
        return f"{self.num_both} both" if self.num_both else f"{self.num_prefill}:{self.num_decode}"


def splits(worker: Worker, load: Load, num_gpus: int) -> list[Split]:
    """All ways to share as many GPUs out, the best first; among equals the one with fewer prefill workers.

    Raises:
        ValueError: a request does not fit a worker's pool.
    """
    found = [*_all_apart(worker, load, num_gpus), _both(worker, load, num_gpus)]
    return sorted(found, key=lambda split: -split.rate)


def splits_for(worker: Worker, load: Load, rate: float) -> list[Split]:
    """As `splits`, with the fewest GPUs of which one way gives the rate; empty: MAX_GPUS do not."""
    # More GPUs never give less.
    too_few, enough = 0, MAX_GPUS + 1
    found: list[Split] = []
    while enough - too_few > 1:
        num_gpus = (too_few + enough) // 2
        tried = splits(worker, load, num_gpus)
        if tried[0].rate >= rate:
            enough, found = num_gpus, tried
        else:
            too_few = num_gpus
    return found


def largest_batch(worker: Worker, load: Load) -> int:
    """Sequences that a decode worker can run at once, within the limit between tokens and in its pool; 0: none."""
    return _num_within(_decode_steps(worker, load, "decode"), load.itl)


def prefill_rate(worker: Worker, load: Load, num_workers: int) -> float:
    """Prompts per second of as many prefill workers that have their first token in time."""
    most = num_workers / worker.prefill(1, load.prompt_len)
    return highest(lambda rate: 1 - _late(worker, load, num_workers, rate) >= load.good_share, most)


def decode_rate(worker: Worker, load: Load) -> float:
    """Requests per second of one decode worker; inf: their first token is their last."""
    if load.output_len == 1:
        return inf
    steps = _decode_steps(worker, load, "decode")
    largest = _num_within(steps, load.itl)

    def is_served(rate: float) -> bool:
        return _even(Running(steps, rate * (load.output_len - 1)), largest, load) >= load.good_share

    return highest(is_served, _most(steps, load))


def _all_apart(worker: Worker, load: Load, num_gpus: int) -> Iterator[Split]:
    """All ways with prefill and decode workers."""
    if num_gpus < 2:
        return
    worker.pool_tokens("prefill", load.num_tokens)
    of_decode = decode_rate(worker, load)
    steps = _decode_steps(worker, load, "decode") if load.output_len > 1 else []
    for num_prefill in range(1, num_gpus):
        yield _apart(worker, load, num_prefill, num_gpus - num_prefill, of_decode, steps)


def _apart(
    worker: Worker, load: Load, num_prefill: int, num_decode: int, of_decode: float, steps: list[float]
) -> Split:
    """Args: of_decode: what decode_rate says; steps: seconds of those of a decode worker."""
    most = prefill_rate(worker, load, num_prefill)
    if load.output_len == 1:
        return Split(num_prefill, num_decode, 0, most, "prefill", 0, worker.chunk_size)
    largest = _num_within(steps, load.itl)

    def running(rate: float) -> Running:
        return Running(steps, rate / num_decode * (load.output_len - 1), num_decode)

    def is_served(rate: float) -> bool:
        in_time = 1 - _late(worker, load, num_prefill, rate)
        return in_time * _even(running(rate), largest, load) >= load.good_share

    rate = highest(is_served, min(most, num_decode * _most(steps, load)))
    num_running = round(running(rate).mean) if rate else 0
    bottleneck = "prefill" if most <= num_decode * of_decode else "decode"
    return Split(num_prefill, num_decode, 0, rate, bottleneck, num_running, worker.chunk_size)


def _both(worker: Worker, load: Load, num_workers: int) -> Split:
    """Workers that compute a piece of a prompt with or between decode steps: it is as large as the limit between tokens
    leaves room for, and the rate as high as keeps first tokens in time and steps short."""
    if load.output_len == 1:
        rate = prefill_rate(worker, load, num_workers)
        return Split(0, 0, num_workers, rate, "both", 0, worker.chunk_size)
    plain = _decode_steps(worker, load, "both")
    steps = BothSteps(worker, plain, load.prompt_len, load.kv_len, load.itl)

    def running(rate: float) -> Running:
        return Running(steps.steps(rate / num_workers), rate / num_workers * (load.output_len - 1), num_workers)

    def is_served(rate: float) -> bool:
        found = running(rate)
        in_time = 1 - steps.late(rate / num_workers, num_workers, load.ttft, found)
        return in_time * _even(found, steps.num_within(rate / num_workers), load) >= load.good_share

    rate = highest(is_served, num_workers * _most(plain, load))
    num_running = round(running(rate).mean) if rate else 0
    return Split(0, 0, num_workers, rate, "both", num_running, steps.pieces[max(0, num_running - 1)])


def _even(running: Running, largest: int, load: Load) -> float:
    """The share of requests whose gaps keep to the limit. Args: largest: sequences of a step that does."""
    if load.itl == inf:
        # Some may wait for a place, but not longer and longer.
        return float(running.is_stable)
    return 1 - running.crowded(largest)


def _late(worker: Worker, load: Load, num_workers: int, rate: float) -> float:
    """The share of prompts whose first token is late, of as many prefill workers."""
    service = worker.prefill(1, load.prompt_len)
    return late(num_workers, rate * service / num_workers, service, load.ttft - service)


def _decode_steps(worker: Worker, load: Load, role: Role) -> list[float]:
    """Seconds of a decode step of 1, 2, ... sequences, as many as a worker runs at most.

    Raises:
        ValueError: a request does not fit a worker's pool.
    """
    num_running = min(worker.max_batch_size, worker.pool_tokens(role, load.num_tokens) // load.num_tokens)
    return [worker.decode_step(size, load.kv_len) for size in range(1, num_running + 1)]


def _num_within(steps: list[float], limit: float) -> int:
    """Of how many sequences the longest step within the limit is; 0: none."""
    return bisect_right(steps, limit)


def _most(steps: list[float], load: Load) -> float:
    """Requests per second that one worker can decode at all."""
    return max(size / step for size, step in enumerate(steps, 1)) / (load.output_len - 1)
