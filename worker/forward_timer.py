"""Fits the duration of an engine's forward passes while it serves."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

from tandem.engine.models.experts import ExpertsConfig
from tandem.forward_times import start_times
from tandem.linear_fit import OUTLIER, LinearFit
from tandem.messages import ForwardTimes

# Interval between updates of the published times, in seconds.
INTERVAL_S = 0.25
# Number of recent steps with prompts in `max_prompt_tokens`.
NUM_REMEMBERED = 32
# Window of `overrun`, in steps. The worst 3 % are ignored, less than the 5 % that may miss a 95th percentile objective:
# each request sees only some steps. MAX_OVERRUN caps each.
NUM_OVERRUNS, EXCEPTIONS, MAX_OVERRUN = 128, 0.03, 1.5
# Weight of a new gap in the moving mean, which is dropped GAP_FORGOTTEN_S after the last gap.
GAP_WEIGHT = 1 / 16
GAP_FORGOTTEN_S = 60.0
_PUBLISHED = [field.name for field in fields(ForwardTimes)]
# Number of factors without experts.
NUM_LINEAR = 6


@dataclass(frozen=True, slots=True)
class FittedTimes(ForwardTimes):
    """Attributes: expert_s: per distinct expert of a layer that a forward pass reads, in all layers."""

    expert_s: float = 0.0


class ForwardWork(NamedTuple):
    """Work of one measured interval, with one factor of the fit for each number.

    Attributes:
        num_prefills: forward passes with prompts.
        num_attended_tokens, num_kv_tokens: tokens attended to, summed over prompt tokens and decoding requests.
        num_steps: decode steps, 0 or 1.
        num_experts: expected distinct experts of a layer, summed over forward passes; 0 without experts.
    """

    num_prefills: int = 0
    num_prompt_tokens: int = 0
    num_attended_tokens: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_kv_tokens: int = 0
    num_experts: float = 0.0

    def seconds(self, times: FittedTimes) -> float:
        """Returns the expected duration of this work."""
        return (
            self.num_prefills * times.prefill_s
            + self.num_prompt_tokens * times.prompt_token_s
            + self.num_attended_tokens * times.attended_token_s
            + self.num_steps * times.step_s
            + self.num_requests * times.request_s
            + self.num_kv_tokens * times.kv_token_s
            + self.num_experts * times.expert_s
        )


class _LaunchedPrompts(NamedTuple):
    began: float
    work: ForwardWork


class ForwardTimer:
    """Fits one linear function to all forward passes of an engine.

    With experts, a step's time is concave in its requests: later rows choose experts that earlier rows read anyway. A
    second fit therefore counts distinct experts. Published times stay linear, for the routers' formulas.

    While requests decode, an interval runs from the end of one decode step to the next. It contains the prompts
    launched between or in them, and all host time. While nothing decodes, each prompt forward is measured alone, from
    its launch or the previous forward's end to its own end.

    Attributes:
        last_step: (requests, attended tokens) of the last decode step; None while nothing decodes.
        overrun: ratio of measured to expected time that recent steps stay within, except a share EXCEPTIONS; at least
            1.
    """

    def __init__(self, device: str, clock: Callable[[], float], experts: ExpertsConfig | None = None) -> None:
        start = start_times(device)
        self._clock = clock
        self._experts = experts
        # Factors in the order of ForwardWork's fields.
        linear = astuple(start)[:NUM_LINEAR]
        self._fit = LinearFit(linear)
        # As if all experts took a decode step's time.
        self._expert_fit = None if experts is None else LinearFit((*linear, start.step_s / experts.num_experts))
        # Whether the last step with prompts was one forward pass.
        self._is_mixed = False
        self._published = ForwardTimes()
        self._published_at = clock()
        self.last_step: tuple[int, int] | None = None
        # None if nothing decoded then.
        self._last_step_end: float | None = None
        # Decode steps in flight, with the prompts since the previous step.
        self._steps: deque[ForwardWork] = deque()
        self._since_step = ForwardWork()
        self._prompts_in_flight: deque[_LaunchedPrompts] = deque()
        # End of the last forward of any kind.
        self._last_end = 0.0
        self._prompt_tokens_per_step: deque[int] = deque(maxlen=NUM_REMEMBERED)
        self._overruns: deque[float] = deque(maxlen=NUM_OVERRUNS)
        self.overrun = 1.0
        self._gap_s = 0.0
        self._last_gap_at = 0.0

    def prompts_launched(self, began: float, num_tokens: int, num_attended: int) -> None:
        """Records a launch of prompts. In a mixed step, call it before `step_launched`.

        Args:
            began: start of the launch, on the clock.
            num_attended: sum over its tokens of the tokens attended to.
        """
        work = ForwardWork(1, num_tokens, num_attended, num_experts=self._num_touched(num_tokens))
        self._prompts_in_flight.append(_LaunchedPrompts(began, work))
        since = self._since_step
        self._since_step = ForwardWork(
            since.num_prefills + 1,
            since.num_prompt_tokens + num_tokens,
            since.num_attended_tokens + num_attended,
            num_experts=since.num_experts + work.num_experts,
        )

    @property
    def expected_prompt_s(self) -> float:
        """Expected time of the last launched forward pass with prompts, without decode steps."""
        return self._prompts_in_flight[-1].work.seconds(self.fitted)

    def prompts_ended(self, *, is_mixed: bool = False) -> None:
        """Records the end of the oldest prompt forward.

        Args:
            is_mixed: it was a mixed step, reported to `step_ended` before; its time is not counted again.
        """
        now = self._clock()
        launched = self._prompts_in_flight.popleft()
        if self.last_step is None and not is_mixed:
            self._observe(launched.work, now - max(launched.began, self._last_end))
        self._last_end = now

    def step_launched(self, num_requests: int, num_context: int, *, is_mixed: bool = False) -> None:
        """Records a decode step's launch.

        Args:
            num_context: attended tokens, summed over the requests.
            is_mixed: the last launched prompts are in the same forward pass.
        """
        since, num_mixed = self._since_step, 0
        num_experts = since.num_experts
        if is_mixed:
            mixed = self._prompts_in_flight[-1].work
            num_mixed = mixed.num_prompt_tokens
            num_experts -= mixed.num_experts
        if since.num_prefills:
            self._is_mixed = is_mixed
        self._steps.append(
            since._replace(
                num_steps=1,
                num_requests=num_requests,
                num_kv_tokens=num_context,
                num_experts=num_experts + self._num_touched(num_requests + num_mixed),
            )
        )
        self._since_step = ForwardWork()
        self.last_step = num_requests, num_context

    @property
    def expected_s(self) -> float:
        """Expected time of the last launched step and the prompts before it."""
        return self._steps[-1].seconds(self.fitted)

    def step_ended(self, *, idle_s: float = 0.0) -> None:
        """Records the end of the oldest decode step. Args: idle_s: time before its launch without a decode step in
        flight, which is no part of the fit unless prompts ran meanwhile."""
        now = self._clock()
        step = self._steps.popleft()
        self._last_end = now
        if self._last_step_end is not None:
            seconds = now - self._last_step_end
            if not step.num_prefills:
                seconds = max(0.0, seconds - idle_s)
            if step.num_prompt_tokens:
                self._prompt_tokens_per_step.append(step.num_prompt_tokens)
                self._note_gap(now, seconds)
                self._note_overrun(seconds, step.seconds(self.fitted))
            else:
                self._overruns.append(0.0)
            self._observe(step, seconds)
        self._last_step_end = now if self.last_step is not None else None

    def num_experts(self, num_requests: int, num_prompt_tokens: int) -> float:
        """Returns ForwardWork.num_experts of a decode step and prompts, in one forward pass or two as recently."""
        if self._is_mixed:
            return self._num_touched(num_requests + num_prompt_tokens)
        return self._num_touched(num_requests) + self._num_touched(num_prompt_tokens)

    def _num_touched(self, num_rows: int) -> float:
        return 0.0 if self._experts is None else self._experts.num_touched(num_rows)

    def _observe(self, work: ForwardWork, seconds: float) -> None:
        self._fit.observe(work[:NUM_LINEAR], seconds)
        if self._expert_fit is not None:
            self._expert_fit.observe(work, seconds)

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
        """Records that no step follows for now."""
        self._since_step = ForwardWork()
        self.last_step = None
        self._last_step_end = None

    @property
    def max_prompt_tokens(self) -> int:
        """Most prompt tokens in a recent interval between steps; 0 if there were none."""
        return max(self._prompt_tokens_per_step, default=0)

    @property
    def has_prompts(self) -> bool:
        """Whether the oldest decode step in flight has prompts before or in it."""
        return self._steps[0].num_prefills > 0

    @property
    def fitted(self) -> FittedTimes:
        """Current times."""
        *linear, expert_s = (*self._fit.factors, 0.0) if self._expert_fit is None else self._expert_fit.factors
        return FittedTimes(**self._named(linear), expert_s=expert_s)

    def _named(self, linear: Sequence[float]) -> dict[str, float]:
        return dict(zip(_PUBLISHED, (*linear, self._gap_s), strict=True))

    def times(self) -> ForwardTimes:
        """Returns the published times, up to INTERVAL_S old; all 0 before the first measurement."""
        now = self._clock()
        if now - self._published_at >= INTERVAL_S:
            self._fit.pass_time(now - self._published_at)
            if self._expert_fit is not None:
                self._expert_fit.pass_time(now - self._published_at)
            self._published_at = now
            if now - self._last_gap_at > GAP_FORGOTTEN_S:
                self._gap_s = 0.0
            if self._fit.has_observed:
                self._published = ForwardTimes(**self._named(self._fit.factors))
        return self._published
