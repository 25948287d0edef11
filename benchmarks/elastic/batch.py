"""Decode steps of a simulated worker, several at once.

Between two changes of the batch every step has the same sequences, and takes a constant and a time per token of KV,
which grows by one token a sequence. So n steps take a sum of two terms, and a worker needs an event per change instead
of one per step.
"""

import heapq
import itertools
import math
from collections.abc import Iterator

from benchmarks.elastic.attempts import Output
from benchmarks.elastic.step_times import StepTimes


class Batch:
    """
    Attributes:
        num_steps: steps so far.
        num_slow: those among them that took longer than `itl_limit_s`.
        num_kv_tokens: of the running sequences.
        fresh: sequences that have not run a step.
    """

    def __init__(self, times: StepTimes, itl_limit_s: float) -> None:
        self._times = times
        self._limit_s = itl_limit_s
        self.num_steps = 0
        self.num_slow = 0
        self.num_kv_tokens = 0
        self.fresh: list[Output] = []
        self._running: dict[Output, None] = {}
        # By the step count at the end of the output.
        self._ends: list[tuple[int, int, Output]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Output]:
        return iter(list(self._running))

    def join(self, output: Output) -> None:
        output.joined_at = output.counted_at = self.num_steps
        output.slow_before = self.num_slow
        self._running[output] = None
        self.fresh.append(output)
        self.num_kv_tokens += output.num_tokens
        heapq.heappush(self._ends, (self.num_steps + output.num_left, next(self._numbers), output))

    def leave(self, output: Output) -> int:
        """Returns the tokens that it has decoded."""
        assert output.joined_at is not None
        num_decoded = self.num_steps - output.joined_at
        del self._running[output]
        self.num_kv_tokens -= output.num_tokens + num_decoded
        if output in self.fresh:
            self.fresh.remove(output)
        return num_decoded

    def youngest(self) -> Output:
        return next(reversed(self._running))

    def steps_to_end(self) -> int:
        """Returns the steps until the first output ends."""
        ends = self._ends
        while ends and ends[0][2] not in self._running:
            heapq.heappop(ends)
        return ends[0][0] - self.num_steps

    def take_ended(self) -> list[Output]:
        ended = []
        while self._ends and self._ends[0][0] <= self.num_steps:
            output = heapq.heappop(self._ends)[2]
            if output in self._running:
                ended.append(output)
        return ended

    def step_s(self) -> float:
        """Returns the seconds of the next step."""
        return self._times.decode[len(self._running)] + self.kv_s()

    def kv_s(self) -> float:
        return self._times.kv_token_s * self.num_kv_tokens

    def steps_s(self, num_steps: int) -> float:
        """Returns the seconds of the next steps."""
        more = self._growth_s() * num_steps * (num_steps - 1) / 2
        return num_steps * self.step_s() + more

    def steps_within(self, seconds: float) -> int:
        """Returns the number of next steps that end within this time."""
        first, growth = self.step_s(), self._growth_s()
        # n * first + growth * n * (n - 1) / 2 <= seconds.
        linear = first - growth / 2
        root = math.sqrt(linear * linear + 2 * growth * seconds)
        # The last bits must not lose a step that ends exactly then.
        return int(2 * seconds / (linear + root) + 1e-9)

    def pass_steps(self, num_steps: int, beside_s: float = 0.0) -> None:
        """Counts steps without prompts, or one that took `beside_s` with some."""
        size = len(self._running)
        if beside_s:
            self.num_slow += beside_s > self._limit_s
        else:
            first, growth = self.step_s(), self._growth_s()
            num_fast = math.floor((self._limit_s - first) / growth) + 1 if growth else num_steps
            self.num_slow += num_steps - max(0, min(num_steps, num_fast))
        self.num_steps += num_steps
        self.num_kv_tokens += num_steps * size

    def _growth_s(self) -> float:
        return self._times.kv_token_s * len(self._running)
