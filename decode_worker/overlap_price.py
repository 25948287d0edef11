"""Price of decode steps with drafts where steps without drafts overlap."""

from tandem.decode_worker.pacing import StepPace
from tandem.worker.forward_timer import ForwardTimer

# Measured over expected time of a step with drafts: before a measurement, and at most.
START, MOST = 1.05, 2.0
# Weight of a step with drafts in the means of time and tokens, and of one without in their return.
WEIGHT, TOKEN_WEIGHT, RETURN_WEIGHT = 1 / 4, 1 / 16, 1 / 512
# No drafts if prompts join more steps than this share. Launching such a step takes the host long, and without overlap
# all streams would wait for it: their 99th percentile would rise.
PROMPT_SHARE = 0.01


class OverlapPrice:
    """The host works while the device idles: before a step with drafts, and before the next one.

    Host times of steps without drafts tell too little of it, because the work grows with the drafts. And the likeliest
    drafts are those whose chance is overestimated. So times and tokens are corrected by those of recent steps with
    drafts. Drafts that lose time end by themselves, and are tried again later.

    Attributes:
        token_share: measured over expected tokens of a step with drafts.
    """

    def __init__(self, timer: ForwardTimer, pace: StepPace) -> None:
        self._timer = timer
        self._pace = pace
        self._slowness = START
        self.token_share = 1.0

    @property
    def allows_drafts(self) -> bool:
        return self._timer.share_with_prompts <= PROMPT_SHARE

    def seconds(self, device_s: float) -> float:
        """Returns the expected time of a step with drafts. Args: device_s: its expected time on the device."""
        return self._slowness * self.uncorrected_s(device_s)

    def uncorrected_s(self, device_s: float) -> float:
        return device_s + self._pace.lost_s

    def drafted(self, uncorrected_s: float, seconds: float, token_share: float) -> None:
        """Takes a step with drafts. Args: seconds: from the end of the step before."""
        self._slowness += WEIGHT * (min(MOST, seconds / uncorrected_s) - self._slowness)
        self.token_share += TOKEN_WEIGHT * (token_share - self.token_share)

    def rested(self) -> None:
        """Counts a step without drafts."""
        self._slowness += RETURN_WEIGHT * (START - self._slowness)
        self.token_share += RETURN_WEIGHT * (1.0 - self.token_share)
