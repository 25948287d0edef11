"""Request rates of a number of GPUs, for each split into roles.

Assumes Poisson arrivals and equal lengths. docs/estimate.md explains the formulas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from tandem.config import Role
from tandem.deploy.estimate.both import BothSteps
from tandem.deploy.estimate.queueing import Running, highest, late
from tandem.deploy.estimate.reuse import Prompt, prompt_of
from tandem.deploy.estimate.worker import Worker

MAX_GPUS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and their objectives.

    Attributes:
        ttft, itl: limits in seconds; inf: none.
        good_share: share of requests that must meet `ttft`, and `itl` in 95 % of their gaps.
        hit_rate, store_hit_rate: shares of each prompt in the pool, and behind it in the page store's memory.
        num_accepted: accepted drafts of a request in a step with all of the worker's num_drafts.
    """

    prompt_len: int
    output_len: int
    ttft: float = inf
    itl: float = inf
    good_share: float = 0.9
    hit_rate: float = 0.0
    store_hit_rate: float = 0.0
    num_accepted: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or self.output_len < 1:
            raise ValueError("a workload has at least one prompt token and one output token")
        if not (self.ttft > 0 and self.itl > 0):
            raise ValueError("limits on ttft and itl must be above 0")
        if not 0 < self.good_share < 1:
            raise ValueError(f"the share of good requests must be between 0 and 1, not {self.good_share:g}")
        if min(self.hit_rate, self.store_hit_rate) < 0 or self.hit_rate + self.store_hit_rate > 1:
            raise ValueError(
                f"the hit rates of pool and store are shares of the same prompt, together at most 1, not "
                f"{self.hit_rate:g} and {self.store_hit_rate:g}"
            )

        if not 0 <= self.num_accepted < self.output_len:
            raise ValueError(f"accepted drafts must be fewer than the output's tokens, not {self.num_accepted:g}")

    @property
    def num_steps(self) -> float:
        """Decode steps of an output, whose first token is the prefill's."""
        return (self.output_len - 1) / (1 + self.num_accepted)

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.output_len

    @property
    def kv_len(self) -> int:
        """Tokens of a sequence in the middle of its output."""
        return self.prompt_len + self.output_len // 2


@dataclass(frozen=True, slots=True)
class Split:
    """A split of workers into roles, and its performance.

    Attributes:
        rate: requests/s within the limits; 0: none.
        bottleneck: role that limits the rate; without a rate, the limits that a request alone misses.
        ttft_alone_s: TTFT of a request on idle workers.
        batch_size: mean sequences per decoding worker at that rate.
        chunk_size: prompt tokens per prefill forward or mixed step.
    """

    num_prefill: int
    num_decode: int
    num_both: int
    rate: float
    bottleneck: str
    ttft_alone_s: float
    batch_size: int
    chunk_size: int

    def __str__(self) -> str:
        return f"{self.num_both} both" if self.num_both else f"{self.num_prefill}:{self.num_decode}"


def splits(worker: Worker, load: Load, num_gpus: int, decoder: Worker | None = None) -> list[Split]:
    """Returns all splits, the best first; among equals the one with fewer prefill workers.

    Args:
        decoder: a decode worker of another degree than `worker`. There is no role both then.

    Raises:
        ValueError: a request does not fit a worker's pool, or the GPUs are too few for workers, or no split uses all.
    """
    found = _splits(worker, load, num_gpus, _both_steps(worker, load, decoder), decoder)
    used = max(num_ranks_of(split, worker, decoder or worker) for split in found)
    num_idle = num_gpus - -(-used // worker.workers_per_gpu)
    if num_idle:
        raise ValueError(
            f"workers of {worker.degree} GPUs leave {num_idle} of {num_gpus} idle: ask for "
            f"{num_gpus - num_idle} or {num_gpus - num_idle + worker.degree}"
        )
    return found


def num_ranks_of(split: Split, worker: Worker, decoder: Worker) -> int:
    return (split.num_prefill + split.num_both) * worker.degree + split.num_decode * decoder.degree


def splits_for(worker: Worker, load: Load, rate: float, decoder: Worker | None = None) -> list[Split]:
    """Returns `splits` of the fewest GPUs that reach `rate`; empty: MAX_GPUS are too few."""
    # The rate never falls with more GPUs.
    num_ranks = worker.degree + (0 if decoder is None else decoder.degree)
    too_few, enough = -(-num_ranks // worker.workers_per_gpu) - 1, MAX_GPUS + 1
    found: list[Split] = []
    steps = _both_steps(worker, load, decoder)
    while enough - too_few > 1:
        num_gpus = (too_few + enough) // 2
        tried = _splits(worker, load, num_gpus, steps, decoder)
        if tried[0].rate >= rate:
            enough, found = num_gpus, tried
        else:
            too_few = num_gpus
    return found


def best_rates(worker: Worker, load: Load) -> Iterator[float]:
    """Returns the requests/s of 1, 2, ... workers that lean to prefill, lean to decode or do both, as serves best."""
    steps, best = _both_steps(worker, load, None), 0.0
    for num_workers in count(1):
        apart = _disaggregated_splits(worker, worker, load, num_workers * worker.degree)
        best = max([best, _both(worker, load, num_workers, steps).rate, *(split.rate for split in apart)])
        yield best


def _splits(worker: Worker, load: Load, num_gpus: int, steps: BothSteps | None, decoder: Worker | None) -> list[Split]:
    num_ranks = num_gpus * worker.workers_per_gpu
    found = [*_disaggregated_splits(worker, decoder or worker, load, num_ranks)]
    if decoder is None and num_ranks >= worker.degree:
        found.append(_both(worker, load, num_ranks // worker.degree, steps))
    if not found:
        degrees = f"{worker.degree}" + ("" if decoder is None else f" and one of {decoder.degree}")
        raise ValueError(f"{num_gpus} GPUs are too few for a worker of {degrees} ranks")
    return sorted(found, key=lambda split: -split.rate)


def _both_steps(worker: Worker, load: Load, decoder: Worker | None) -> BothSteps | None:
    """Returns None if the output of one token needs no steps, or there is no role both."""
    if load.output_len == 1 or decoder is not None:
        return None
    plain, prompt = _decode_steps(worker, load, "both"), prompt_of_load(worker, load)
    return BothSteps(
        worker, plain, prompt.num_computed, load.kv_len, load.itl, max(1, round(load.num_steps)), prompt.num_before
    )


def prompt_of_load(worker: Worker, load: Load) -> Prompt:
    return prompt_of(worker, load.prompt_len, load.hit_rate, load.store_hit_rate)


def prefill_s(worker: Worker, prompt: Prompt) -> float:
    """Returns the seconds to compute one prompt, once its hits are loaded."""
    return worker.prefill(1, prompt.num_computed, num_before=prompt.num_before)


def ttft_alone_s(worker: Worker, load: Load) -> float:
    """Returns the TTFT on an idle prefill worker, in seconds."""
    prompt = prompt_of_load(worker, load)
    return prompt.loading_s + prefill_s(worker, prompt)


def largest_batch(worker: Worker, load: Load) -> int:
    """Returns a decode worker's largest batch within the ITL limit and its pool, as all smaller ones are; 0: none."""
    steps = _decode_steps(worker, load, "decode")
    return next((num_fast for num_fast, step in enumerate(steps) if step > load.itl), len(steps))


def steps_for_one(worker: Worker, load: Load, batch_size: int) -> float:
    """Returns the steps of batch_size that give as many tokens as one with all drafts."""
    if not worker.num_drafts:
        return 1.0
    room = worker.num_drafts_of(batch_size) / worker.num_drafts
    return (1 + load.num_accepted) / (1 + load.num_accepted * room)


def prefill_rate(worker: Worker, load: Load, num_workers: int) -> float:
    prompt = prompt_of_load(worker, load)
    most = num_workers / max(prefill_s(worker, prompt), prompt.loading_s)
    return highest(lambda rate: 1 - _late(worker, load, num_workers, rate) >= load.good_share, most)


def decode_rate(worker: Worker, load: Load) -> float:
    """Returns the requests/s of one decode worker; inf for outputs of one token."""
    if load.output_len == 1:
        return inf
    steps = _decode_steps(worker, load, "decode")
    slow = _slow_shares(steps, load)
    full_steps = _as_full_steps(steps, worker, load)

    def is_served(rate: float) -> bool:
        return _itl_share(Running(full_steps, rate * load.num_steps), slow, load) >= load.good_share

    return highest(is_served, _max_decode_rate(full_steps, load))


def _disaggregated_splits(worker: Worker, decoder: Worker, load: Load, num_ranks: int) -> Iterator[Split]:
    if num_ranks < worker.degree + decoder.degree:
        return
    worker.pool_tokens("prefill", load.num_tokens)
    decode_worker_rate = decode_rate(decoder, load)
    steps = _decode_steps(decoder, load, "decode") if load.output_len > 1 else []
    for num_prefill in range(1, (num_ranks - decoder.degree) // worker.degree + 1):
        num_decode = (num_ranks - num_prefill * worker.degree) // decoder.degree
        yield _disaggregated(worker, decoder, load, num_prefill, num_decode, decode_worker_rate, steps)


def _disaggregated(
    worker: Worker,
    decoder: Worker,
    load: Load,
    num_prefill: int,
    num_decode: int,
    decode_worker_rate: float,
    steps: list[float],
) -> Split:
    most, alone_s = prefill_rate(worker, load, num_prefill), ttft_alone_s(worker, load)
    if load.output_len == 1:
        bottleneck = _bottleneck("prefill", most, load, alone_s)
        return Split(num_prefill, num_decode, 0, most, bottleneck, alone_s, 0, worker.chunk_size)
    slow = _slow_shares(steps, load)
    full_steps = _as_full_steps(steps, decoder, load)

    def running(rate: float) -> Running:
        return Running(full_steps, rate / num_decode * load.num_steps, num_decode)

    def is_served(rate: float) -> bool:
        in_time = 1 - _late(worker, load, num_prefill, rate)
        return in_time * _itl_share(running(rate), slow, load) >= load.good_share

    rate = highest(is_served, min(most, num_decode * _max_decode_rate(full_steps, load)))
    num_running = round(running(rate).mean) if rate else 0
    slower: Role = "prefill" if most <= num_decode * decode_worker_rate else "decode"
    bottleneck = _bottleneck(slower, rate, load, alone_s, steps[0])
    return Split(num_prefill, num_decode, 0, rate, bottleneck, alone_s, num_running, worker.chunk_size)


def _both(worker: Worker, load: Load, num_workers: int, steps: BothSteps | None) -> Split:
    alone_s = ttft_alone_s(worker, load)
    if steps is None:
        rate = prefill_rate(worker, load, num_workers)
        bottleneck = _bottleneck("both", rate, load, alone_s)
        return Split(0, 0, num_workers, rate, bottleneck, alone_s, 0, worker.chunk_size)
    prompt = prompt_of_load(worker, load)

    def running(rate: float) -> Running:
        full_steps = _as_full_steps(steps.steps(rate / num_workers), worker, load)
        return Running(full_steps, rate / num_workers * load.num_steps, num_workers)

    def is_served(rate: float) -> bool:
        found = running(rate)
        in_time = 1 - steps.late(rate / num_workers, num_workers, load.ttft, found)
        in_time *= 1 - _late_loads(prompt, rate / num_workers, load.ttft - prefill_s(worker, prompt))
        return in_time * _itl_share(found, steps.slow_shares(rate / num_workers), load) >= load.good_share

    rate = highest(is_served, num_workers * _max_decode_rate(_as_full_steps(steps.plain, worker, load), load))
    num_running = round(running(rate).mean) if rate else 0
    chunk_size = round(prompt.num_computed / steps.chunks[max(0, num_running - 1)].number)
    alone_s = max(alone_s, steps.ttft_alone_s)
    bottleneck = _bottleneck("both", rate, load, alone_s, steps.plain[0])
    return Split(0, 0, num_workers, rate, bottleneck, alone_s, num_running, chunk_size)


def _bottleneck(role: Role, rate: float, load: Load, ttft_s: float, step_s: float = 0.0) -> str:
    """Returns the role, or the limits that no rate meets. Args: ttft_s, step_s: of a request alone."""
    missed = [name for name, took, limit in (("ttft", ttft_s, load.ttft), ("itl", step_s, load.itl)) if took > limit]
    return " and ".join(missed) if missed and not rate else role


def _itl_share(running: Running, slow: list[float], load: Load) -> float:
    """Args: slow: share of slow requests by number of others."""
    if load.itl == inf:
        # Any wait is in time, unless the queue grows without bound.
        return float(running.is_stable)
    return 1 - running.slow_share(slow)


def _late(worker: Worker, load: Load, num_workers: int, rate: float) -> float:
    prompt = prompt_of_load(worker, load)
    service = prefill_s(worker, prompt)
    queued = late(num_workers, rate * service / num_workers, service, load.ttft - service)
    return 1 - (1 - queued) * (1 - _late_loads(prompt, rate / num_workers, load.ttft - service))


def _late_loads(prompt: Prompt, rate: float, limit: float) -> float:
    """Returns the share of prompts whose loads end after `limit`. Loads of a worker follow each other, and run while
    their prompts are queued.

    Args:
        rate: prompts/s of one worker.
    """
    if not prompt.loading_s:
        return 0.0
    return late(1, rate * prompt.loading_s, prompt.loading_s, limit - prompt.loading_s)


def _decode_steps(worker: Worker, load: Load, role: Role) -> list[float]:
    num_running = min(worker.max_batch_size, worker.pool_tokens(role, load.num_tokens) // load.num_tokens)
    return [worker.decode_step(size, load.kv_len) for size in range(1, num_running + 1)]


def _as_full_steps(steps: Sequence[float], worker: Worker, load: Load) -> list[float]:
    """Returns the seconds for as many tokens as a step with all drafts gives. Args: steps: of 1, 2, ... sequences."""
    return [step * steps_for_one(worker, load, size) for size, step in enumerate(steps, 1)]


def _slow_shares(steps: list[float], load: Load) -> list[float]:
    return [float(step > load.itl) for step in steps]


def _max_decode_rate(steps: Sequence[float], load: Load) -> float:
    return max(size / step for size, step in enumerate(steps, 1)) / load.num_steps
