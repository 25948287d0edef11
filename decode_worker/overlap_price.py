"""Price of decode steps with drafts where steps without drafts overlap."""

import math
from collections import deque
from statistics import median_low
from typing import NamedTuple

from tandem.decode_worker.pacing import StepPace

# Measured over expected time of a step with drafts: before a measurement, and at most.
START, MOST = 1.05, 2.0
# Weight of a step with drafts in the means of time and tokens, and of one without in their return.
WEIGHT, TOKEN_WEIGHT, RETURN_WEIGHT = 1 / 4, 1 / 16, 1 / 512
# Requests of a step whose tokens have this weight. Fewer tell less.
TOKEN_REQUESTS = 16
# Steps without drafts are measured by batch size, this many sizes for each doubling.
SIZES_PER_DOUBLING = 4
# Recent ones of a size that count, the fewest that do, and steps with drafts after which they are measured again.
WINDOW, FEWEST, MAX_AGE = 4, 2, 256
# Share of steps with prompts up to which there are drafts. Beyond it, the 99th percentile of the streams' gaps is a
# step with prompts, and drafts would raise it: fewer steps, among them as many with prompts.
PROMPT_SHARE = 0.005
# Weights of a step in two means of that share, of which the larger counts: one is soon known, the other lasts.
PROMPT_WEIGHTS = 1 / 128, 1 / 512


class StepTime(NamedTuple):
    """
    Attributes:
        seconds: from the end of the step before; None if that was no recent one.
        num_tokens: sampled and accepted ones of all requests.
        overlaps: whether it was launched before the end of the step before.
        has_prompts: whether prompts were computed in it, or since the step before.
    """

    seconds: float | None
    num_requests: int
    num_tokens: int
    has_drafts: bool
    overlaps: bool
    has_prompts: bool


class _PlainTimes:
    """Recent times of steps without drafts of one batch size. Attributes: age: steps with drafts since."""

    def __init__(self) -> None:
        self.seconds = deque[float](maxlen=WINDOW)
        self.age = 0


class OverlapPrice:
    """The host works while the device idles: before a step with drafts, and before the next one.

    Host times of steps without drafts tell too little of it, because the work grows with the drafts. And the likeliest
    drafts are those whose chance is overestimated. So times and tokens are corrected by those of recent steps with
    drafts. Drafts that lose time end by themselves, and are tried again later.

    The time of steps without drafts is measured too. A fit to all steps tells too little of it while most have drafts.

    Attributes:
        token_share: measured over expected tokens of a step with drafts.
    """

    def __init__(self, pace: StepPace) -> None:
        self._pace = pace
        self._slowness = START
        self.token_share = 1.0
        self._plain: dict[int, _PlainTimes] = {}
        # Means of recent steps of any kind.
        self._prompt_shares = [0.0 for _ in PROMPT_WEIGHTS]
        self._step_s = 0.0

    @property
    def allows_drafts(self) -> bool:
        return max(self._prompt_shares) <= PROMPT_SHARE

    @property
    def limit_s(self) -> float:
        """Longest time of steps that prompts join no more often than PROMPT_SHARE."""
        share = max(self._prompt_shares)
        return PROMPT_SHARE * self._step_s / share if share else math.inf

    def plain_s(self, num_requests: int) -> float | None:
        """Returns the time of a step without drafts; None if it must be measured first."""
        times = self._plain.get(_size_of(num_requests))
        return None if times is None or len(times.seconds) < FEWEST else median_low(times.seconds)

    def seconds(self, device_s: float) -> float:
        """Returns the expected time of a step with drafts. Args: device_s: its expected time on the device."""
        return self._slowness * (device_s + self._pace.lost_s)

    def passed(self, step: StepTime, device_s: float = 0.0, expected_tokens: float = 0.0) -> None:
        """Takes a step.

        Args:
            device_s: expected time on the device of a step with drafts.
            expected_tokens: its expected tokens, uncorrected.
        """
        if step.seconds is not None:
            for number, weight in enumerate(PROMPT_WEIGHTS):
                self._prompt_shares[number] += weight * (step.has_prompts - self._prompt_shares[number])
            self._step_s += (PROMPT_WEIGHTS[0] if self._step_s else 1.0) * (step.seconds - self._step_s)
        times = self._plain.setdefault(_size_of(step.num_requests), _PlainTimes())
        if step.has_drafts:
            times.age += 1
            if times.age > MAX_AGE:
                times.seconds.clear()
            if step.seconds is not None and expected_tokens:
                self._slowness += WEIGHT * (min(MOST, step.seconds / (device_s + self._pace.lost_s)) - self._slowness)
                weight = TOKEN_WEIGHT * min(1.0, step.num_requests / TOKEN_REQUESTS)
                self.token_share += weight * (step.num_tokens / expected_tokens - self.token_share)
            return
        self._slowness += RETURN_WEIGHT * (START - self._slowness)
        self.token_share += RETURN_WEIGHT * (1.0 - self.token_share)
        if step.seconds is not None and step.overlaps and not step.has_prompts:
            times.seconds.append(step.seconds)
            times.age = 0


def _size_of(num_requests: int) -> int:
    return round(SIZES_PER_DOUBLING * math.log2(num_requests))
