"""Step times of a worker of role both, by batch size, with and without a prompt chunk."""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

from tandem.both_worker.step_budget import FILLED, MIN_TOKENS
from tandem.deploy.estimate.queueing import Running, late, more_than
from tandem.deploy.estimate.worker import Worker
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS

# Parts of a prompt, each with chunks of one size: tokens far behind attend to more.
_NUM_PARTS = 2
# Candidate sizes of chunks above the largest graph are this far apart.
_CHUNK_STEP = 256
# The ITL limit applies to the 95th percentile of a request's gaps.
SLOW_SHARE = 0.05


class ChunkBudget:
    """Choice of chunks beside a step, as workers make it (both_worker/step_budget.py)."""

    def __init__(
        self, worker: Worker, plain: Sequence[float], prompt_len: int, kv_len: int, itl: float, num_cached: int = 0
    ) -> None:
        """
        Args:
            plain: seconds of steps of 1, 2, ... sequences without a chunk.
            prompt_len, kv_len, num_cached: as for BothSteps.
            itl: objective, unless the worker has its own.
        """
        self._worker, self._plain, self._kv_len = worker, plain, kv_len
        self._prompt_len, self._num_cached = prompt_len, num_cached
        self._filled = FILLED * (worker.itl_objective or itl)
        longest = min(worker.chunk_size, prompt_len)
        beyond = range(NUM_PROMPT_TOKENS[-1], longest, _CHUNK_STEP)
        smallest = min(MIN_TOKENS, longest)
        self._sizes = sorted({size for size in (*NUM_PROMPT_TOKENS, *beyond, longest) if smallest <= size <= longest})

    def chunk_size(self, batch_size: int, num_before: int) -> int:
        """Args: num_before: tokens of its prompt already computed."""

        def took(size: int) -> float:
            return self.took(size, batch_size, num_before)

        num_fitting = bisect_right(self._sizes, self._filled, key=took)
        smallest, largest = self._sizes[0], self._sizes[-1]
        if num_fitting or smallest == largest:
            return self._sizes[max(0, num_fitting - 1)]
        # Workers fit one line to all sizes.
        token_s = (took(largest) - took(smallest)) / (largest - smallest)
        if took(smallest) - token_s * smallest < self._filled:
            return smallest
        # No chunk meets the objective: one that takes as long as the step.
        return self._sizes[max(0, bisect_right(self._sizes, self._plain[batch_size - 1] / token_s) - 1)]

    def took(self, size: int, batch_size: int, num_before: int) -> float:
        """Returns the seconds of a step with a chunk."""
        num_attended = self._num_cached + min(num_before, self._prompt_len - size)
        apart = self._plain[batch_size - 1] + self._worker.chunk(size, num_attended)
        if not self._worker.mixed_steps:
            return apart
        # Without a graph, one mixed forward is no faster than two.
        return min(apart, self._worker.mixed_step(batch_size, self._kv_len, size, num_attended))


class Chunks(NamedTuple):
    """Chunks of one prompt.

    Attributes:
        number: mean number; parts of a prompt may have a fraction.
        seconds: of all steps with them.
        num_slow: those in steps beyond the ITL limit.
    """

    number: float
    seconds: float
    num_slow: float


class BothSteps:
    """Steps of 1, 2, ... sequences, with chunks of the workers' budget.

    `rate` is in prompts/s, times are in seconds.

    Attributes:
        plain: steps without a chunk.
        chunks: of a prompt beside 1, 2, ... sequences.
    """

    def __init__(
        self,
        worker: Worker,
        plain: Sequence[float],
        prompt_len: int,
        kv_len: int,
        itl: float,
        num_gaps: int,
        num_cached: int = 0,
    ) -> None:
        """
        Args:
            prompt_len: tokens to compute of each prompt.
            kv_len: tokens of each sequence.
            itl: limit that all gaps of a request meet, except SLOW_SHARE of them.
            num_gaps: gaps of each request.
            num_cached: tokens before those of each prompt.
        """
        self._itl, self._num_gaps = itl, num_gaps
        self.plain = plain
        budget = ChunkBudget(worker, plain, prompt_len, kv_len, itl, num_cached)
        self.chunks: list[Chunks] = []
        for batch_size in range(1, len(plain) + 1):
            number = seconds = num_slow = 0.0
            for part in range(_NUM_PARTS):
                num_before = prompt_len * (2 * part + 1) // (2 * _NUM_PARTS)
                size = budget.chunk_size(batch_size, num_before)
                took = budget.took(size, batch_size, num_before)
                in_part = prompt_len / size / _NUM_PARTS
                number += in_part
                seconds += in_part * took
                num_slow += in_part * (took > itl)
            self.chunks.append(Chunks(number, seconds, num_slow))

    @property
    def ttft_alone_s(self) -> float:
        """Of a prompt that finds one sequence, halfway through a step."""
        return self.chunks[0].seconds + self.plain[0] / 2

    def slow_shares(self, rate: float) -> list[float]:
        """Returns the share of requests with over SLOW_SHARE of their gaps beyond the limit, by number of others."""
        return [self._slow_share(num_others, rate) for num_others in range(len(self.plain))]

    def _slow_share(self, num_others: int, rate: float) -> float:
        if self.plain[num_others] > self._itl:
            return 1.0
        num_slow = ceil(round(self.chunks[num_others].num_slow, 6))
        if not num_slow:
            return 0.0
        num_allowed = int(SLOW_SHARE * self._num_gaps)
        num_prompts = num_allowed // num_slow
        # The request is slow if one more prompt starts during its fast steps and the chunks of num_prompts prompts.
        # Others come and go evenly meanwhile, so on average half of them decode beside it.
        beside = min(len(self.plain) - 1, (num_others + num_prompts + 1) // 2)
        fast_s = (self._num_gaps - num_allowed) * self.plain[beside]
        return more_than(num_prompts, rate * (fast_s + num_prompts * self.chunks[beside].seconds))

    def busy(self, rate: float) -> list[float]:
        """Returns the share of time in steps with a chunk, by batch size; 1 or more: overload."""
        return [rate * chunks.seconds for chunks in self.chunks]

    def steps(self, rate: float) -> list[float]:
        means = []
        for plain, chunks, busy in zip(self.plain, self.chunks, self.busy(rate), strict=True):
            with_chunk = chunks.seconds / chunks.number
            means.append(1 / (rate * chunks.number + (1 - busy) / plain) if busy < 1 else with_chunk)
        return means

    def late(self, rate: float, num_workers: int, ttft: float, running: Running) -> float:
        busy = self.busy(rate)
        # An arriving prompt sees the time average.
        beside = [*range(len(busy)), len(busy) - 1]
        if ttft == inf:
            # Any wait is in time, unless the queue grows without bound.
            return float(sum(share * busy[index] for share, index in zip(running.shares, beside, strict=True)) >= 1)
        found = 0.0
        for share, index in zip(running.shares, beside, strict=True):
            service = self.chunks[index].seconds
            # On average the current step is half over.
            found += share * late(num_workers, busy[index], service, ttft - service - self.plain[index] / 2)
        return found
