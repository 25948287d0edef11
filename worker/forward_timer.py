"""Measures forward passes of one engine while it serves, and fits their duration."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tandem.forward_times import start_times
from tandem.linear_fit import OUTLIER, LinearFit
from tandem.messages import ForwardTimes

# Interval between updates of the published times, in seconds.
INTERVAL_S = 0.25
# Number of recent steps with prompts whose prompt tokens are remembered.
NUM_REMEMBERED = 32
# Number of recent steps over which `overrun` is taken. The worst 3 % are ignored: this is below the 5 % that may miss
# a 95th percentile objective, because each request sees only some of the steps. MAX_OVERRUN caps each step's overrun.
NUM_OVERRUNS, EXCEPTIONS, MAX_OVERRUN = 128, 0.03, 1.5
# Weight of a new gap in the moving mean of gaps. The mean is dropped GAP_FORGOTTEN_S after the last gap.
GAP_WEIGHT = 1 / 16
GAP_FORGOTTEN_S = 60.0


class ForwardWork(NamedTuple):
    """Work of one measured interval. Each number has one factor in the fit, in seconds.

    Attributes:
        num_prefills: forward passes with prompt tokens.
        num_prompt_tokens: prompt tokens in these passes.
        num_attended_tokens: sum over the prompt tokens of the tokens that each attends to.
        num_steps: decode steps; 0 or 1.
        num_requests: requests in the decode step.
        num_kv_tokens: sum over these requests of the tokens that each attends to.
    """

    num_prefills: int = 0
    num_prompt_tokens: int = 0
    num_attended_tokens: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_kv_tokens: int = 0

    def seconds(self, times: ForwardTimes) -> float:
        """Returns the expected duration of this work."""
        return (
            self.num_prefills * times.prefill_s
            + self.num_prompt_tokens * times.prompt_token_s
            + self.num_attended_tokens * times.attended_token_s
            + self.num_steps * times.step_s
            + self.num_requests * times.request_s
            + self.num_kv_tokens * times.kv_token_s
        )


class _LaunchedPrompts(NamedTuple):
    """Prompt part of a forward pass in flight, launched at `began`."""

    began: float
    work: ForwardWork


class ForwardTimer:
    """Fits one linear function to all forward passes of one engine. The engine thread reports launches and ends.

    While requests decode, the measured interval runs from the end of one decode step to the end of the next. It
    contains the prompts launched between these steps and those in the same forward pass, and all host time. While
    nothing decodes, each prompt forward is measured alone: from its launch, or from the end of the forward before it
    if that is later, to its end.

    Attributes:
        last_step: (requests, attended tokens) of the last decode step; None while nothing decodes.
        overrun: ratio of measured to expected time that recent steps stay within, except a share EXCEPTIONS of them; at
            least 1. Steps without prompts count as 0.
    """

    def __init__(self, device: str, clock: Callable[[], float]) -> None:
        """
        Args:
            device: "cpu", "cuda" or "cuda:0".
            clock: returns seconds.
        """
        start = start_times(device)
        self._clock = clock
        # Factors in the order of ForwardWork's fields.
        self._fit = LinearFit(
            (
                start.prefill_s,
                start.prompt_token_s,
                start.attended_token_s,
                start.step_s,
                start.request_s,
                start.kv_token_s,
            )
        )
        self._published = ForwardTimes()
        self._published_at = clock()
        self.last_step: tuple[int, int] | None = None
        # End of the last completed decode step; None if nothing decoded then.
        self._last_step_end: float | None = None
        # Decode steps in flight, each with the prompts launched since the step before it.
        self._steps: deque[ForwardWork] = deque()
        # Prompts launched since the last decode step was launched.
        self._since_step = ForwardWork()
        self._prompts_in_flight: deque[_LaunchedPrompts] = deque()
        # End of the last completed forward of any kind.
        self._last_end = 0.0
        self._prompt_tokens_per_step: deque[int] = deque(maxlen=NUM_REMEMBERED)
        self._overruns: deque[float] = deque(maxlen=NUM_OVERRUNS)
        self.overrun = 1.0
        self._gap_s = 0.0
        self._last_gap_at = 0.0

    def prompts_launched(self, began: float, num_tokens: int, num_attended: int) -> None:
        """Records the launch of a forward with prompts. In a mixed step, call this before `step_launched`.

        Args:
            began: start of the launch, on the clock.
            num_attended: sum over its tokens of the tokens that each attends to.
        """
        work = ForwardWork(1, num_tokens, num_attended)
        self._prompts_in_flight.append(_LaunchedPrompts(began, work))
        since = self._since_step
        self._since_step = ForwardWork(
            since.num_prefills + 1, since.num_prompt_tokens + num_tokens, since.num_attended_tokens + num_attended
        )

    def prompts_ended(self, *, is_mixed: bool = False) -> None:
        """Records the end of the oldest forward with prompts.

        Args:
            is_mixed: it was a mixed step, whose `step_ended` came before. The step has its time; the time is dropped if
                nothing decodes any more.
        """
        now = self._clock()
        launched = self._prompts_in_flight.popleft()
        if self.last_step is None and not is_mixed:
            self._fit.observe(launched.work, now - max(launched.began, self._last_end))
        self._last_end = now

    def step_launched(self, num_requests: int, num_context: int) -> None:
        """Records the launch of a decode step. Args: num_context: tokens that its requests attend to, summed."""
        self._steps.append(self._since_step._replace(num_steps=1, num_requests=num_requests, num_kv_tokens=num_context))
        self._since_step = ForwardWork()
        self.last_step = num_requests, num_context

    @property
    def expected_s(self) -> float:
        """Expected time of the last launched step, including the prompts since the step before it."""
        return self._steps[-1].seconds(self.fitted)

    def step_ended(self) -> None:
        """Records the end of the oldest decode step in flight."""
        now = self._clock()
        step = self._steps.popleft()
        self._last_end = now
        if self._last_step_end is not None:
            seconds = now - self._last_step_end
            if step.num_prompt_tokens:
                self._prompt_tokens_per_step.append(step.num_prompt_tokens)
                self._note_gap(now, seconds)
                self._note_overrun(seconds, step.seconds(self.fitted))
            else:
                self._overruns.append(0.0)
            self._fit.observe(step, seconds)
        self._last_step_end = now if self.last_step is not None else None

    def _note_overrun(self, seconds: float, expected_s: float) -> None:
        self._overruns.append(min(seconds, MAX_OVERRUN * expected_s) / expected_s if expected_s else 1.0)
        within = sorted(self._overruns)[int((1 - EXCEPTIONS) * (len(self._overruns) - 1))]
        self.overrun = max(1.0, within)

    def _note_gap(self, at: float, seconds: float) -> None:
        if self._gap_s:
            self._gap_s += GAP_WEIGHT * (min(seconds, OUTLIER * self._gap_s) - self._gap_s)
        else:
            self._gap_s = seconds
        self._last_gap_at = at

    def nothing_decoded(self) -> None:
        """Records that no step follows the last one for now."""
        self._since_step = ForwardWork()
        self.last_step = None
        self._last_step_end = None

    @property
    def max_prompt_tokens(self) -> int:
        """Largest number of prompt tokens in a recent interval between two steps; 0 if there were none."""
        return max(self._prompt_tokens_per_step, default=0)

    @property
    def fitted(self) -> ForwardTimes:
        """Times fitted to everything observed so far."""
        return ForwardTimes(*self._fit.factors, gap_beside_prompts_s=self._gap_s)

    def times(self) -> ForwardTimes:
        """Returns the published times, at most INTERVAL_S old; all 0 until something was measured."""
        now = self._clock()
        if now - self._published_at >= INTERVAL_S:
            self._fit.pass_time(now - self._published_at)
            self._published_at = now
            if now - self._last_gap_at > GAP_FORGOTTEN_S:
                self._gap_s = 0.0
            if self._fit.has_observed:
                self._published = self.fitted
        return self._published
