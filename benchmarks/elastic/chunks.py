"""Prompt tokens beside a decode step, as both_worker/step_budget.py sizes them."""

from collections.abc import Sequence

from benchmarks.elastic.attempts import Prompt
from benchmarks.elastic.batch import Batch
from benchmarks.elastic.step_times import StepTimes
from tandem.both_worker.step_budget import FILLED, MIN_TOKENS


class Chunks:
    def __init__(self, times: StepTimes, itl_s: float) -> None:
        self._times = times
        self._filled_s = FILLED * itl_s
        # Index of the last size: the next one is near.
        self._last = 0

    def size_beside(self, batch: Batch, num_before: int) -> int:
        """Args: num_before: tokens before the chunk in its prompt."""
        if not len(batch):
            return self._times.chunk_size
        sizes, index = self._times.sizes, self._last
        while index + 1 < len(sizes) and self._took(index, batch, num_before) <= self._filled_s:
            index += 1
        while index >= 0 and self._took(index, batch, num_before) > self._filled_s:
            index -= 1
        self._last = max(0, index)
        return sizes[index] if index >= 0 else self._least(batch, num_before)

    def seconds(self, chunk: Sequence[tuple[Prompt, int]], batch: Batch) -> float:
        num_tokens = num_attended = 0.0
        for prompt, size in chunk:
            num_tokens += size
            num_attended += size * (prompt.num_done + size / 2)
        if not len(batch):
            return self._times.prefill(int(num_tokens), num_attended)
        return self._times.mixed(len(batch), int(num_tokens), num_attended) + batch.kv_s()

    def _took(self, index: int, batch: Batch, num_before: int) -> float:
        size = self._times.sizes[index]
        return self._times.mixed(len(batch), size, size * (num_before + size / 2)) + batch.kv_s()

    def _least(self, batch: Batch, num_before: int) -> int:
        """Returns the smallest chunk, or without any time left, one that takes as long as the step."""
        sizes = self._times.sizes
        smallest = self._took(0, batch, num_before)
        # Workers fit one line to all sizes.
        token_s = (self._took(4, batch, num_before) - smallest) / (sizes[4] - sizes[0])
        if smallest - token_s * sizes[0] < self._filled_s:
            return MIN_TOKENS
        return max(MIN_TOKENS, int(batch.step_s() / token_s))
