"""How long a worker's forwards take, learned while it serves from when they are launched and when they have ended."""

from collections import deque
from collections.abc import Callable

from tandem.forward_times import start_times
from tandem.linear_fit import OUTLIER, LinearFit
from tandem.messages import ForwardTimes

# So often is reckoned anew what the worker says of itself.
INTERVAL_S = 0.25
# What prompts took beside steps is remembered of so many lots.
NUM_REMEMBERED = 32
# How far steps with prompts are off is remembered of so many of all steps, but for a share of these: less than the
# twentieth that may miss an objective for the 95th percentile, because each request sees some of them only. Nobody is
# off by more than so much.
NUM_MISSES, EXCEPTIONS, MAX_OVERRUN = 128, 0.03, 1.5
# Share of a new gap in the mean of gaps; so long after the last one the mean is forgotten.
NEWS = 1 / 16
GAP_FORGOTTEN_S = 60.0


class ForwardTimer:
    """Fits one linear function to everything that one engine computes, whatever the worker's role.

    Beside decode steps prompts are in the time from one step's end to the next, which is what their requests wait for a
    token: those that were launched before the step, and those that are in one forward with it. Launches and whatever
    else the host does between are included. While nothing is decoded a forward of prompts is timed by itself: from its
    launch, or from the end of the one before, which it had to wait for, to its own end. All is told by the engine
    thread.

    Attributes:
        last_step: requests of the last decode step, and the tokens that they attend to; None: nothing is being decoded.
        overrun: of late, no more than a few in a hundred of all steps were such with prompts that took more than so
            many times what was expected of them; at least 1.
    """

    def __init__(self, device: str, clock: Callable[[], float]) -> None:
        """Args: device: "cpu", "cuda" or "cuda:0"; clock: seconds."""
        start = start_times(device)
        self._clock = clock
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
        self._times = ForwardTimes()
        self._told_at = clock()
        self.last_step: tuple[int, int] | None = None
        # When the one before those that have not ended did; None: nothing was decoded then.
        self._last_step_end: float | None = None
        # Of the steps that have not ended: the prompts since the one before, and the step.
        self._steps: deque[tuple[int, int, int, int, int, int]] = deque()
        # Of the forwards of prompts since the last decode step: how many, and what was in them.
        self._since_step = (0, 0, 0)
        # Of those that have not ended: when each was launched, and what is in it.
        self._launched: deque[tuple[float, int, int]] = deque()
        # Of the forward before, whatever was in it.
        self._last_end = 0.0
        self._lots: deque[int] = deque(maxlen=NUM_REMEMBERED)
        self._misses: deque[float] = deque(maxlen=NUM_MISSES)
        self.overrun = 1.0
        self._gap_s = 0.0
        self._last_gap_at = 0.0

    def prompts_launched(self, began: float, num_tokens: int, num_attended: int) -> None:
        """A forward of prompts has been launched. If it is one with a decode step, that is told after it.

        Args:
            began: when that began, on the clock.
            num_attended: how many tokens its tokens attend to, added up.
        """
        self._launched.append((began, num_tokens, num_attended))
        forwards, tokens, attended = self._since_step
        self._since_step = forwards + 1, tokens + num_tokens, attended + num_attended

    def prompts_ended(self, *, is_mixed: bool = False) -> None:
        """The oldest of those that were launched has ended.

        Args:
            is_mixed: it was one with a decode step, whose end is told before. Its time is that step's, and nobody's if
                nothing is decoded any more.
        """
        now = self._clock()
        began, num_tokens, num_attended = self._launched.popleft()
        if self.last_step is None and not is_mixed:
            self._fit.observe((1, num_tokens, num_attended, 0, 0, 0), now - max(began, self._last_end))
        self._last_end = now

    def step_launched(self, num_requests: int, num_context: int) -> None:
        """A decode step has been launched. Args: num_context: tokens that its requests attend to, added up."""
        self._steps.append((*self._since_step, 1, num_requests, num_context))
        self._since_step = (0, 0, 0)
        self.last_step = num_requests, num_context

    @property
    def expected_s(self) -> float:
        """What the step that was launched last takes, with the prompts since the one before, by all that was seen so
        far."""
        return self._expected_s(self._steps[-1])

    def _expected_s(self, step: tuple[int, ...]) -> float:
        return sum(factor * number for factor, number in zip(self._fit.factors, step, strict=True))

    def step_ended(self) -> None:
        """The oldest of those that were launched has ended."""
        now = self._clock()
        step = self._steps.popleft()
        self._last_end = now
        if self._last_step_end is not None:
            seconds = now - self._last_step_end
            if num_tokens := step[1]:
                self._lots.append(num_tokens)
                self._saw_gap(now, seconds)
                self._saw_miss(seconds, self._expected_s(step))
            else:
                self._misses.append(0.0)
            self._fit.observe(step, seconds)
        self._last_step_end = now if self.last_step is not None else None

    def _saw_miss(self, seconds: float, expected_s: float) -> None:
        self._misses.append(min(seconds, MAX_OVERRUN * expected_s) / expected_s if expected_s else 1.0)
        within = sorted(self._misses)[int((1 - EXCEPTIONS) * (len(self._misses) - 1))]
        self.overrun = max(1.0, within)

    def _saw_gap(self, at: float, seconds: float) -> None:
        if self._gap_s:
            self._gap_s += NEWS * (min(seconds, OUTLIER * self._gap_s) - self._gap_s)
        else:
            self._gap_s = seconds
        self._last_gap_at = at

    def nothing_decoded(self) -> None:
        """No step follows the last one for now."""
        self._since_step = (0, 0, 0)
        self.last_step = None
        self._last_step_end = None

    @property
    def largest_lot(self) -> int:
        """The most prompt tokens that were lately computed between two steps; 0: none were."""
        return max(self._lots, default=0)

    @property
    def fitted(self) -> ForwardTimes:
        """By all that was seen so far."""
        prefill_s, prompt_token_s, attended_token_s, step_s, request_s, kv_token_s = self._fit.factors
        return ForwardTimes(prefill_s, prompt_token_s, attended_token_s, step_s, request_s, kv_token_s, self._gap_s)

    def times(self) -> ForwardTimes:
        """What the worker says of itself, some moments old; all 0 as long as it has computed nothing."""
        now = self._clock()
        if now - self._told_at >= INTERVAL_S:
            self._fit.pass_time(now - self._told_at)
            self._told_at = now
            if now - self._last_gap_at > GAP_FORGOTTEN_S:
                self._gap_s = 0.0
            if self._fit.has_observed:
                self._times = self.fitted
        return self._times
