"""Number of prompt tokens between two decode steps, limited by the ITL objective."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Protocol

from tandem.messages import ForwardTimes
from tandem.prefill_worker.budget import PromptBudget, PromptRest, fill
from tandem.worker.forward_timer import ForwardTimer, ForwardWork

# Share of the objective that an expected step may fill: nearly all steps must meet it.
FILLED = 0.93
# Minimum for prompts beside a step, so that they do not starve. On a GPU fewer take no less time: weights are read
# anyway.
MIN_TOKENS = 128
# Maximum ratio of a chunk to the largest recent one.
MAX_GROWTH = 2


class Padding(Protocol):
    def num_unpadded(self, num_decoded: int, num_prompt_tokens: int) -> int: ...

    def num_padded(self, num_decoded: int, num_prompt_tokens: int) -> int: ...


class StepBudget(PromptBudget):
    """Fits chunks into the ITL objective beside the next step, by recent forward times. Each prompt's tokens attend to
    its own prefix. Chunks start small and double while there is time.

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

    def fit(self, prompts: Iterator[PromptRest]) -> list[int]:
        if self._timer.last_step is None or not self._objective_s:
            return fill(prompts, self._max_tokens)
        # Most steps have no prompts: do not solve the fit for them.
        first = next(prompts, None)
        if first is None:
            return []
        prompts = chain((first,), prompts)
        num_requests, num_context = self._timer.last_step
        times = self._timer.fitted
        most = min(self._max_tokens, max(self._min_tokens, MAX_GROWTH * self._timer.max_prompt_tokens))
        step = ForwardWork(num_steps=1, num_requests=num_requests, num_kv_tokens=num_context)
        beside = step._replace(num_prefills=1, num_experts=self._timer.num_experts(num_requests, most))
        left_s = min(FILLED, 1 / self._timer.overrun) * self._objective_s - beside.seconds(times)
        if left_s <= 0:
            # Even the smallest chunk misses the objective: smaller ones only starve prompts.
            left_s = step._replace(num_experts=self._timer.num_experts(num_requests, 0)).seconds(times)
        taken: list[PromptRest] = []
        sizes = self._fill(prompts, taken, most, times, left_s)
        if self._padding is None:
            return sizes
        return _cut(sizes, self._num_unpadded(self._padding, num_requests, taken, sizes, times, left_s))

    def _fill(
        self, prompts: Iterator[PromptRest], taken: list[PromptRest], most: int, times: ForwardTimes, left_s: float
    ) -> list[int]:
        """Returns the chunks that fill `left_s` or have `most` tokens, and appends their prompts to `taken`."""
        sizes: list[int] = []
        least = self._min_tokens
        for prompt in prompts:
            taken.append(prompt)
            token_s = times.prompt_token_s + times.attended_token_s * prompt.num_cached
            fitting = _root(times.attended_token_s / 2, token_s, left_s)
            size = int(min(prompt.num_left, most, max(least, fitting)))
            sizes.append(size)
            most, least = most - size, least - size
            left_s -= _chunk_s(times, prompt, size)
            if size < prompt.num_left or not most or (least <= 0 and left_s < times.prompt_token_s):
                break
        return sizes

    def _num_unpadded(
        self,
        padding: Padding,
        num_requests: int,
        taken: Sequence[PromptRest],
        sizes: Sequence[int],
        times: ForwardTimes,
        left_s: float,
    ) -> int:
        """Returns the part of the chunks to compute, in tokens."""
        num_tokens = sum(sizes)
        num_unpadded = padding.num_unpadded(num_requests, num_tokens)
        wholes = [end for end, size, p in zip(accumulate(sizes), sizes, taken, strict=True) if size == p.num_left]
        if not wholes or wholes[-1] <= num_unpadded:
            return num_unpadded
        # Other prompts' tokens may replace the padding, if there is time.
        for whole in (num_tokens, *reversed(wholes)):
            if whole <= num_unpadded:
                break
            # Padding attends to nothing.
            num_padding = padding.num_padded(num_requests, whole) - whole
            chunks_s = sum(map(partial(_chunk_s, times), taken, _cut(sizes, whole)))
            if chunks_s + times.prompt_token_s * num_padding <= left_s:
                return whole
        return num_unpadded


def _chunk_s(times: ForwardTimes, prompt: PromptRest, num_tokens: int) -> float:
    """Returns the time of a prompt's next tokens: n tokens attend to n * num_cached + n^2 / 2 tokens."""
    num_attended = num_tokens * prompt.num_cached + num_tokens * num_tokens / 2
    return times.prompt_token_s * num_tokens + times.attended_token_s * num_attended


def _cut(sizes: Sequence[int], num_tokens: int) -> list[int]:
    """Returns the first `num_tokens` of these chunks."""
    return [min(size, max(0, num_tokens - (end - size))) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _root(quadratic: float, linear: float, value: float) -> float:
    """Returns the x > 0 with quadratic * x^2 + linear * x = value; 0 if value <= 0."""
    if value <= 0.0:
        return 0.0
    if quadratic == 0.0:
        return value / linear if linear else float("inf")
    # This form avoids subtracting two large numbers.
    return float(2 * value / (linear + (linear * linear + 4 * quadratic * value) ** 0.5))
