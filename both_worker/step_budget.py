"""How many prompt tokens are computed between two decode steps, so that tokens come in time."""

from collections import deque
from collections.abc import Callable

from prefill_worker.budget import PromptBudget
from tandem.linear_fit import LinearFit

# Of the objective, so much is filled by what a step is expected to take: steps differ, and the objective is for nearly
# all of them.
FILLED = 0.9
# Prompts get so many tokens a step whatever that has others wait for: they must not starve. Fewer are computed in no
# less time on a GPU, which has the weights to read.
MIN_TOKENS = 128
# A piece is no more than this many times as large as the largest of those that the estimates are from.
MAX_GROWTH = 2
NUM_REMEMBERED = 32
# Seconds of a step with nothing in it, of a request that decodes, of a token that it attends to, of a prompt token, and
# of a token that this attends to, as long as nothing was seen: those of a device that is faster than any.
_START = (1e-3, 1e-5, 5e-9, 5e-6, 2e-10)


class StepBudget(PromptBudget):
    """Learns what decode steps and prompts take from the times between steps.

    From one decode step's launch to the next it takes a + b * requests + c * tokens attended to by these + d * prompt
    tokens + e * tokens attended to by those, in seconds; the factors are fitted to what was seen of late, launches and
    whatever else the host does between included. Where they say little, pieces begin small and double as long as they
    leave room.
    """

    def __init__(self, objective_s: float, max_tokens: int, clock: Callable[[], float]) -> None:
        """
        Args:
            objective_s: seconds between two tokens of a request; 0: they do not matter.
            max_tokens: of a forward, in any case.
        """
        self._left_s = FILLED * objective_s
        self._max_tokens = max_tokens
        self._min_tokens = min(MIN_TOKENS, max_tokens)
        self._clock = clock
        self._fit = LinearFit(_START)
        # Of the prompt forwards since the last decode step.
        self._num_tokens = 0
        self._num_attended = 0
        # Of the last decode step: when it was launched, its requests, and the tokens that they attend to. None: nothing
        # is being decoded.
        self._last_step: tuple[float, int, int] | None = None
        self._sizes = deque([self._min_tokens // MAX_GROWTH], maxlen=NUM_REMEMBERED)

    def num_tokens(self, num_cached: int) -> int:
        if self._last_step is None or not self._left_s:
            return self._max_tokens
        _, num_requests, num_context = self._last_step
        base, per_request, per_context, per_token, per_attended = self._fit.factors
        step_s = base + per_request * num_requests + per_context * num_context
        left_s = self._left_s - step_s
        if left_s <= 0:
            # The objective is missed without prompts too. Small pieces would gain nothing and have them starve.
            left_s = step_s
        # A token attends to those before it: n of them to n * num_cached + n^2 / 2.
        linear = per_token + per_attended * num_cached
        fitting = _root(per_attended / 2, linear, left_s)
        largest = min(self._max_tokens, MAX_GROWTH * max(self._sizes))
        return int(max(self._min_tokens, min(fitting, largest)))

    def launched(self, num_tokens: int, num_attended: int) -> None:
        self._num_tokens += num_tokens
        self._num_attended += num_attended

    def step_launched(self, num_requests: int, num_context: int) -> None:
        """A decode step has been launched. Args: num_context: tokens that its requests attend to, added up."""
        now = self._clock()
        if self._last_step is not None and self._left_s:
            began, *sizes = self._last_step
            self._fit.observe((1.0, *sizes, self._num_tokens, self._num_attended), now - began)
            if self._num_tokens:
                self._sizes.append(self._num_tokens)
        self._num_tokens = self._num_attended = 0
        self._last_step = now, num_requests, num_context

    def nothing_decoded(self) -> None:
        """No request waits for its next token."""
        self._num_tokens = self._num_attended = 0
        self._last_step = None


def _root(quadratic: float, linear: float, value: float) -> float:
    """The x above 0 with quadratic * x^2 + linear * x = value; all at least 0."""
    if quadratic == 0.0:
        return value / linear if linear else float("inf")
    # This way no two large numbers are subtracted.
    return float(2 * value / (linear + (linear * linear + 4 * quadratic * value) ** 0.5))
