"""How many prompt tokens are computed between two decode steps, so that tokens come in time."""

from collections.abc import Callable
from typing import Protocol

from tandem.prefill_worker.budget import PromptBudget, PromptRest
from tandem.worker.forward_timer import ForwardTimer

# Of the objective, at most so much is filled by what a step is expected to take: steps differ, and the objective is for
# nearly all of them.
FILLED = 0.9
# Prompts get so many tokens a step whatever that has others wait for: they must not starve. Fewer are computed in no
# less time on a GPU, which has the weights to read.
MIN_TOKENS = 128
# A piece is no more than this many times as large as the largest of those that the estimates are from.
MAX_GROWTH = 2


class Padding(Protocol):
    """How an engine pads prompts beside so many sequences that are decoded, as EngineBase says."""

    def num_unpadded(self, num_decoded: int, num_prompt_tokens: int) -> int: ...

    def num_padded(self, num_decoded: int, num_prompt_tokens: int) -> int: ...


class StepBudget(PromptBudget):
    """As many as fit into the objective beside the next step, by what forwards have taken of late. Where that says
    little, pieces begin small and double as long as they leave room.

    Pieces end where an engine computes no padding, which would take as long as tokens. But all that is left of a prompt
    is one piece where that is within the budget and there is time for its padding too: a piece of its own, for what
    would be left over, takes a step more and has padding itself."""

    def __init__(
        self,
        objective_s: float,
        max_tokens: int,
        timer: ForwardTimer,
        padding: Padding | None = None,
    ) -> None:
        """
        Args:
            objective_s: seconds between two tokens of a request; 0: they do not matter.
            max_tokens: of a forward, in any case.
            timer: of all that the engine computes.
            padding: of that engine; None: it computes none.
        """
        self._objective_s = objective_s
        self._max_tokens = max_tokens
        self._min_tokens = min(MIN_TOKENS, max_tokens)
        self._timer = timer
        self._padding = padding

    def num_tokens(self, first: Callable[[], PromptRest]) -> int:
        if self._timer.last_step is None or not self._objective_s:
            return self._max_tokens
        num_requests, num_context = self._timer.last_step
        times = self._timer.fitted
        step_s = times.step_s + times.request_s * num_requests + times.kv_token_s * num_context
        left_s = min(FILLED, 1 / self._timer.overrun) * self._objective_s - step_s - times.prefill_s
        if left_s <= 0:
            # The objective is missed without prompts too, or by the smallest. Small pieces would gain nothing and have
            # them starve.
            left_s = step_s
        # A token attends to those before it: n of them to n * num_cached + n^2 / 2.
        num_cached, num_left = first()
        attended_s = times.attended_token_s * num_cached
        fitting = _root(times.attended_token_s / 2, times.prompt_token_s + attended_s, left_s)
        largest = min(self._max_tokens, max(self._min_tokens, MAX_GROWTH * self._timer.max_prompt_tokens))
        num_tokens = int(max(self._min_tokens, min(fitting, largest)))
        if self._padding is None:
            return num_tokens
        num_unpadded = self._padding.num_unpadded(num_requests, num_tokens)
        if num_unpadded < num_left <= num_tokens:
            # Padding attends to nothing. What is there of other prompts takes the place of some, if there is time.
            for whole in (num_tokens, num_left):
                padded_s = times.prompt_token_s * self._padding.num_padded(num_requests, whole)
                if padded_s + (attended_s + times.attended_token_s * whole / 2) * whole <= left_s:
                    return whole
        return num_unpadded


def _root(quadratic: float, linear: float, value: float) -> float:
    """The x above 0 with quadratic * x^2 + linear * x = value, the first two at least 0; 0: there is none."""
    if value <= 0.0:
        return 0.0
    if quadratic == 0.0:
        return value / linear if linear else float("inf")
    # This way no two large numbers are subtracted.
    return float(2 * value / (linear + (linear * linear + 4 * quadratic * value) ** 0.5))
