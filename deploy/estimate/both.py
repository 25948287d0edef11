"""Step times of a worker of role both, by batch size, with and without a prompt chunk."""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from tandem.both_worker.step_budget import FILLED, MIN_TOKENS
from tandem.deploy.estimate.queueing import Running, late
from tandem.deploy.estimate.worker import Worker
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS

# Chunks above the largest graph may have any size; candidates are this far apart.
_PIECE_STEP = 256
# The ITL limit applies to the 95th percentile of a request's gaps.
SLOW_SHARE = 0.05


class BothSteps:
    """Steps of 1, 2, ... sequences. Chunk sizes follow the workers' budget (both_worker/step_budget.py).

    Attributes:
        plain: seconds of a decode-only step.
        pieces: tokens of the chunk.
        with_piece: seconds of a step with the chunk.
    """

    def __init__(self, worker: Worker, plain: Sequence[float], prompt_len: int, kv_len: int, itl: float) -> None:
        """Args: kv_len: tokens of each sequence; itl: limit in seconds."""
        self._prompt_len = prompt_len
        self.plain = plain
        longest = min(worker.chunk_size, prompt_len)
        beyond = range(NUM_PROMPT_TOKENS[-1], longest, _PIECE_STEP)
        smallest = min(MIN_TOKENS, longest)
        sizes = sorted({size for size in (*NUM_PROMPT_TOKENS, *beyond, longest) if smallest <= size <= longest})
        self.pieces: list[int] = []
        self.with_piece: list[float] = []
        shortest: list[float] = []
        for batch_size, step in enumerate(plain, 1):

            def took(size: int, batch_size: int = batch_size, step: float = step) -> float:
                num_before = (prompt_len - size) // 2
                apart = step + worker.piece(size, num_before)
                if not worker.mixed_steps:
                    return apart
                # Without a graph, one mixed forward is no faster than two.
                return min(apart, worker.mixed_step(batch_size, kv_len, size, num_before))

            index = max(0, bisect_right(sizes, FILLED * itl, key=took) - 1)
            self.pieces.append(sizes[index])
            self.with_piece.append(took(sizes[index]))
            shortest.append(took(sizes[0]))
        self._itl, self._shortest = itl, shortest

    def num_within(self, rate: float) -> int:
        """Returns the largest batch within the ITL limit.

        Batches with chunks in over 5 % of their steps count with the smallest chunk. Args: rate: prompts/s.
        """
        pieces, means = self._pieces(rate), self.steps(rate)
        for index, (plain, shortest) in enumerate(zip(self.plain, self._shortest, strict=True)):
            with_piece = pieces[index] * means[index]
            if (shortest if with_piece > SLOW_SHARE else plain) > self._itl:
                return index
        return len(self.plain)

    def busy(self, rate: float) -> list[float]:
        """Returns the share of time in steps with a chunk, by batch size; 1 or more: overload. Args: rate: prompts/s."""
        return [pieces * took for pieces, took in zip(self._pieces(rate), self.with_piece, strict=True)]

    def steps(self, rate: float) -> list[float]:
        """Returns the mean seconds of a step, by batch size. Args: rate: prompts/s."""
        means = []
        for plain, took, pieces in zip(self.plain, self.with_piece, self._pieces(rate), strict=True):
            # Per second: `pieces` steps with a chunk; decode-only steps fill the rest.
            busy = pieces * took
            means.append(1 / (pieces + (1 - busy) / plain) if busy < 1 else took)
        return means

    def _pieces(self, rate: float) -> list[float]:
        """Returns chunks/s. Args: rate: prompts/s."""
        return [rate * self._prompt_len / piece for piece in self.pieces]

    def late(self, rate: float, num_workers: int, ttft: float, running: Running) -> float:
        """Returns the share of prompts without a first token within `ttft`.

        Args:
            rate: prompts/s of each worker.
            running: distribution of the batch size.
        """
        busy = self.busy(rate)
        # An arriving prompt sees the time average.
        beside = [*range(len(busy)), len(busy) - 1]
        if ttft == inf:
            # Any wait is in time, unless the queue grows without bound.
            return float(sum(share * busy[index] for share, index in zip(running.shares, beside, strict=True)) >= 1)
        found = 0.0
        for share, index in zip(running.shares, beside, strict=True):
            service = self._prompt_len / self.pieces[index] * self.with_piece[index]
            # On average the current step is half over.
            found += share * late(num_workers, busy[index], service, ttft - service - self.plain[index] / 2)
        return found
