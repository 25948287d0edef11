"""How many prompt tokens are computed between two decode steps, so that tokens come in time."""

from collections.abc import Callable

from prefill_worker.budget import PromptBudget
from worker.forward_timer import ForwardTimer

# Of the objective, so much is filled by what a step is expected to take: steps differ, and the objective is for nearly
# all of them.
FILLED = 0.9
# Prompts get so many tokens a step whatever that has others wait for: they must not starve. Fewer are computed in no
# less time on a GPU, which has the weights to read.
MIN_TOKENS = 128
# A piece is no more than this many times as large as the largest of those that the estimates are from.
MAX_GROWTH = 2


class StepBudget(PromptBudget):
    """As many as fit into the objective beside the next step, by what forwards have taken of late. Where that says
    little, pieces begin small and double as long as they leave room."""

    def __init__(
        self,
        objective_s: float,
        max_tokens: int,
        timer: ForwardTimer,
        num_unpadded: Callable[[int, int], int] | None = None,
    ) -> None:
        """
        Args:
            objective_s: seconds between two tokens of a request; 0: they do not matter.
            max_tokens: of a forward, in any case.
            timer: of all that the engine computes.
            num_unpadded: of that engine, as EngineBase says; None: it computes no padding.
        """
        self._left_s = FILLED * objective_s
        self._max_tokens = max_tokens
        self._min_tokens = min(MIN_TOKENS, max_tokens)
        self._timer = timer
        self._num_unpadded = num_unpadded

    def num_tokens(self, num_cached: Callable[[], int]) -> int:
        if self._timer.last_step is None or not self._left_s:
            return self._max_tokens
        num_requests, num_context = self._timer.last_step
        times = self._timer.fitted
        step_s = times.step_s + times.request_s * num_requests + times.kv_token_s * num_context
        left_s = self._left_s - step_s - times.prefill_s
        if left_s <= 0:
            # The objective is missed without prompts too, or by the smallest. Small pieces would gain nothing and have
            # them starve.
            left_s = step_s
        # A token attends to those before it: n of them to n * num_cached + n^2 / 2.
        linear = times.prompt_token_s + times.attended_token_s * num_cached()
        fitting = _root(times.attended_token_s / 2, linear, left_s)
        largest = min(self._max_tokens, max(self._min_tokens, MAX_GROWTH * self._timer.largest_lot))
        num_tokens = int(max(self._min_tokens, min(fitting, largest)))
        return num_tokens if self._num_unpadded is None else self._num_unpadded(num_requests, num_tokens)


def _root(quadratic: float, linear: float, value: float) -> float:
    """The x above 0 with quadratic * x^2 + linear * x = value, the first two at least 0; 0: there is none."""
    if value <= 0.0:
        return 0.0
    if quadratic == 0.0:
        return value / linear if linear else float("inf")
    # This way no two large numbers are subtracted.
    return float(2 * value / (linear + (linear * linear + 4 * quadratic * value) ** 0.5))
