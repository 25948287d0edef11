"""What a worker that does both takes for its steps, of as many sequences as it may run, and what is beside them."""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from tandem.both_worker.step_budget import FILLED, MIN_TOKENS
from tandem.deploy.estimate.queueing import Running, late
from tandem.deploy.estimate.worker import Worker
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS

# Pieces of more tokens than the largest graph has are of whatever size; looked at are multiples of this.
_PIECE_STEP = 256
# Of a request's gaps so many may be longer than its limit, which is on their 95th percentile.
SLOW_SHARE = 0.05


class BothSteps:
    """Steps of 1, 2, ... sequences, with a piece of a prompt and without: pieces are as large as the workers' own
    budget has them (both_worker/step_budget.py).

    Attributes:
        plain: seconds of a decode step by itself.
        pieces: tokens of the piece.
        with_piece: seconds of a step with it.
    """

    def __init__(self, worker: Worker, plain: Sequence[float], prompt_len: int, kv_len: int, itl: float) -> None:
        """Args: plain: as the attribute; kv_len: tokens of each sequence; itl: seconds."""
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
                # Without a graph one forward takes no less than two.
                return min(apart, worker.mixed_step(batch_size, kv_len, size, num_before))

            index = max(0, bisect_right(sizes, FILLED * itl, key=took) - 1)
            self.pieces.append(sizes[index])
            self.with_piece.append(took(sizes[index]))
            shortest.append(took(sizes[0]))
        self._itl, self._shortest = itl, shortest

    def num_within(self, rate: float) -> int:
        """Of how many sequences at most steps are within the limit between tokens: with the smallest piece where more
        than one step in twenty has one, at as many prompts a second."""
        pieces, means = self._pieces(rate), self.steps(rate)
        for index, (plain, shortest) in enumerate(zip(self.plain, self._shortest, strict=True)):
            with_piece = pieces[index] * means[index]
            if (shortest if with_piece > SLOW_SHARE else plain) > self._itl:
                return index
        return len(self.plain)

    def busy(self, rate: float) -> list[float]:
        """The share of the time that steps with pieces take, at as many prompts a second; from 1 on they do not keep
        up."""
        return [pieces * took for pieces, took in zip(self._pieces(rate), self.with_piece, strict=True)]

    def steps(self, rate: float) -> list[float]:
        """Seconds of a step in the mean, at as many prompts a second."""
        means = []
        for plain, took, pieces in zip(self.plain, self.with_piece, self._pieces(rate), strict=True):
            # So many steps in a second have a piece, and what these leave of it is for those that have none.
            busy = pieces * took
            means.append(1 / (pieces + (1 - busy) / plain) if busy < 1 else took)
        return means

    def _pieces(self, rate: float) -> list[float]:
        """Pieces a second, at as many prompts a second."""
        return [rate * self._prompt_len / piece for piece in self.pieces]

    def late(self, rate: float, num_workers: int, ttft: float, running: Running) -> float:
        """The share of prompts that have no first token within `ttft`.

        Args:
            rate: prompts a second of each worker.
            running: those that are decoded beside.
        """
        busy = self.busy(rate)
        # A prompt that comes finds as many as there are in the mean of time.
        beside = [*range(len(busy)), len(busy) - 1]
        if ttft == inf:
            # They may wait, but not longer and longer.
            return float(sum(share * busy[index] for share, index in zip(running.shares, beside, strict=True)) >= 1)
        found = 0.0
        for share, index in zip(running.shares, beside, strict=True):
            service = self._prompt_len / self.pieces[index] * self.with_piece[index]
            # The step that runs when it comes is half over.
            found += share * late(num_workers, busy[index], service, ttft - service - self.plain[index] / 2)
        return found
