"""Number of prompt tokens between two decode steps, limited by the ITL objective."""

from collections.abc import Callable
from typing import Protocol

from tandem.prefill_worker.budget import PromptBudget, PromptRest
from tandem.worker.forward_timer import ForwardTimer, ForwardWork

# Share of the objective that an expected step may fill: nearly all steps must meet it.
FILLED = 0.9
# Minimum for prompts beside a step, so that they do not starve. On a GPU fewer take no less time: weights are read
# anyway.
MIN_TOKENS = 128
# Maximum ratio of a chunk to the largest recent one.
MAX_GROWTH = 2


class Padding(Protocol):
    def num_unpadded(self, num_decoded: int, num_prompt_tokens: int) -> int: ...

    def num_padded(self, num_decoded: int, num_prompt_tokens: int) -> int: ...


class StepBudget(PromptBudget):
    """Fits chunks into the ITL objective beside the next step, by recent forward times. Chunks start small and double
    while there is time.

    They end where an engine needs no padding. The rest of a prompt is one chunk, padding included, if budget and time
    allow: a separate chunk would need another step and its own padding.
    """

    def __init__(
        self,
        objective_s: float,
        max_tokens: int,
        timer: ForwardTimer,
        padding: Padding | None = None,
    ) -> None:
        """
        Args:
            objective_s: ITL objective in seconds; 0 for none.
            max_tokens: limit of a forward pass.
            padding: the engine's padding; None for none.
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
        step = ForwardWork(num_steps=1, num_requests=num_requests, num_kv_tokens=num_context)
        step_s = step.seconds(times)
        left_s = min(FILLED, 1 / self._timer.overrun) * self._objective_s - step_s - times.prefill_s
        if left_s <= 0:
            # Even the smallest chunk misses the objective: smaller ones only starve prompts.
            left_s = step_s
        # n tokens attend to n * num_cached + n^2 / 2 tokens.
        num_cached, num_left = first()
        attended_s = times.attended_token_s * num_cached
        fitting = _root(times.attended_token_s / 2, times.prompt_token_s + attended_s, left_s)
        largest = min(self._max_tokens, max(self._min_tokens, MAX_GROWTH * self._timer.max_prompt_tokens))
        num_tokens = int(max(self._min_tokens, min(fitting, largest)))
        if self._padding is None:
            return num_tokens
        num_unpadded = self._padding.num_unpadded(num_requests, num_tokens)
        if num_unpadded < num_left <= num_tokens:
            # Padding attends to nothing. Other prompts' tokens may replace it, if there is time.
            for whole in (num_tokens, num_left):
                padded_s = times.prompt_token_s * self._padding.num_padded(num_requests, whole)
                if padded_s + (attended_s + times.attended_token_s * whole / 2) * whole <= left_s:
                    return whole
        return num_unpadded


def _root(quadratic: float, linear: float, value: float) -> float:
    """Returns the x > 0 with quadratic * x^2 + linear * x = value; 0 if value <= 0."""
    if value <= 0.0:
        return 0.0
    if quadratic == 0.0:
        return value / linear if linear else float("inf")
    # This form avoids subtracting two large numbers.
    return float(2 * value / (linear + (linear * linear + 4 * quadratic * value) ** 0.5))
