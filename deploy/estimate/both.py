"""Step times of a worker of role both, by batch size, with and without a prompt chunk."""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from tandem.both_worker.step_budget import FILLED, MIN_TOKENS
from tandem.deploy.estimate.queueing import Running, late
from tandem.deploy.estimate.worker import Worker
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS

# Candidate sizes of chunks above the largest graph are this far apart.
_CHUNK_STEP = 256
# The ITL limit applies to the 95th percentile of a request's gaps.
SLOW_SHARE = 0.05


class BothSteps:
    """Steps of 1, 2, ... sequences, with chunks of the workers' budget (both_worker/step_budget.py).

    `rate` is in prompts/s, times are in seconds.
    """

    def __init__(
        self, worker: Worker, plain: Sequence[float], prompt_len: int, kv_len: int, itl: float, num_cached: int = 0
    ) -> None:
        """
        Args:
            prompt_len: tokens to compute of each prompt.
            kv_len: tokens of each sequence.
            num_cached: tokens before those of each prompt.
        """
        self._prompt_len = prompt_len
        self.plain = plain
        longest = min(worker.chunk_size, prompt_len)
        beyond = range(NUM_PROMPT_TOKENS[-1], longest, _CHUNK_STEP)
        smallest = min(MIN_TOKENS, longest)
        sizes = sorted({size for size in (*NUM_PROMPT_TOKENS, *beyond, longest) if smallest <= size <= longest})
        self.chunk_sizes: list[int] = []
        self.with_chunk: list[float] = []
        shortest: list[float] = []
        for batch_size, step in enumerate(plain, 1):

            def took(size: int, batch_size: int = batch_size, step: float = step) -> float:
                num_before = num_cached + (prompt_len - size) // 2
                apart = step + worker.chunk(size, num_before)
                if not worker.mixed_steps:
                    return apart
                # Without a graph, one mixed forward is no faster than two.
                return min(apart, worker.mixed_step(batch_size, kv_len, size, num_before))

            index = max(0, bisect_right(sizes, FILLED * itl, key=took) - 1)
            self.chunk_sizes.append(sizes[index])
            self.with_chunk.append(took(sizes[index]))
            shortest.append(took(sizes[0]))
        self._itl, self._shortest = itl, shortest

    def num_within(self, rate: float) -> int:
        """Returns the largest batch within the ITL limit, with the smallest chunk if over 5 % of its steps have one."""
        chunks_per_s, means = self._chunks_per_s(rate), self.steps(rate)
        for index, (plain, shortest) in enumerate(zip(self.plain, self._shortest, strict=True)):
            chunk_share = chunks_per_s[index] * means[index]
            if (shortest if chunk_share > SLOW_SHARE else plain) > self._itl:
                return index
        return len(self.plain)

    def busy(self, rate: float) -> list[float]:
        """Returns the share of time in steps with a chunk, by batch size; 1 or more: overload."""
        return [
            chunks_per_s * took for chunks_per_s, took in zip(self._chunks_per_s(rate), self.with_chunk, strict=True)
        ]

    def steps(self, rate: float) -> list[float]:
        means = []
        for plain, took, chunks_per_s in zip(self.plain, self.with_chunk, self._chunks_per_s(rate), strict=True):
            busy = chunks_per_s * took
            means.append(1 / (chunks_per_s + (1 - busy) / plain) if busy < 1 else took)
        return means

    def _chunks_per_s(self, rate: float) -> list[float]:
        return [rate * self._prompt_len / size for size in self.chunk_sizes]

    def late(self, rate: float, num_workers: int, ttft: float, running: Running) -> float:
        busy = self.busy(rate)
        # An arriving prompt sees the time average.
        beside = [*range(len(busy)), len(busy) - 1]
        if ttft == inf:
            # Any wait is in time, unless the queue grows without bound.
            return float(sum(share * busy[index] for share, index in zip(running.shares, beside, strict=True)) >= 1)
        found = 0.0
        for share, index in zip(running.shares, beside, strict=True):
            service = self._prompt_len / self.chunk_sizes[index] * self.with_chunk[index]
            # On average the current step is half over.
            found += share * late(num_workers, busy[index], service, ttft - service - self.plain[index] / 2)
        return found
