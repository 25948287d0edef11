"""Number of drafts that a model makes for each request of a step."""

import math
from collections.abc import Sequence

from tandem.decode_worker.overlap_price import OverlapPrice, StepTime
from tandem.decode_worker.plain_step import longest_step_s, plain_step_s
from tandem.engine.draft_costs import DraftCosts
from tandem.linear_fit import OUTLIER
from tandem.messages import ForwardTimes
from tandem.worker.forward_timer import ForwardTimer

# Steps between two that draft although none is expected to gain time, so that acceptance stays known.
PROBE_STEPS = 64
# Weight of a step in the means of drafting times.
WEIGHT = 1 / 16
# Share of a fitted step that is no drafting, at least: the fit lags behind the mean of drafting times.
LEAST_SHARE = 1 / 16


class DraftDepth:
    """Chooses one depth for all requests, because a pass of the drafter takes about as long for all as for one.

    The best depth has the most expected tokens per second, by the acceptance of each request, the times of steps and
    those of the drafter's passes.

    Attributes:
        is_probe: whether the last choice was one draft that is expected to gain nothing.
    """

    def __init__(
        self,
        timer: ForwardTimer,
        itl_objective_s: float,
        costs: DraftCosts | None = None,
        price: OverlapPrice | None = None,
    ) -> None:
        """Args: as of DraftPolicy."""
        self._timer = timer
        self._objective_s = itl_objective_s
        self._costs = costs
        self._price = price
        # Of a step, beyond its passes on the device, during which the host prepares the next pass. If start-up has not
        # measured passes: of a whole pass.
        self._beyond_s: float | None = None
        # Of all steps, also without drafts. Where none overlap, the fit times them from end to end, drafting included.
        self._drafting_s = 0.0
        self._num_without = 0
        self.is_probe = False
        # Of a step with the last chosen depth: seconds on the device and tokens, uncorrected; 0: not known.
        self._device_s = self._num_tokens = 0.0

    def drafted(self, num_passes: int, seconds: float, num_rows: int = 0) -> None:
        """Records a step's drafting. Args: num_passes: 0: it had no drafts; num_rows: requests with drafts."""
        self._drafting_s += WEIGHT * (seconds - self._drafting_s)
        self._num_without = 0 if num_passes else self._num_without + 1
        if num_passes:
            device_s = self._pass_s(num_rows)
            beyond = seconds - num_passes * device_s if device_s else seconds / num_passes
            known = self._beyond_s
            if known is None:
                known = 0.0 if device_s else beyond
            # One pause of the host is no reason to end drafts: few later ones would correct it.
            longest = OUTLIER * max(known, device_s) or beyond
            self._beyond_s = known + WEIGHT * (min(longest, beyond) - known)

    def choose(self, requests: Sequence[tuple[float, int]], num_requests: int, num_context: int) -> int:
        """Returns the drafts of each request, of which one may have fewer.

        Args:
            requests: that may have drafts: acceptance, and the most drafts.
            num_requests, num_context: as of DraftPolicy.choose.
        """
        self.is_probe = False
        self._device_s = self._num_tokens = 0.0
        most = max((of_request for _, of_request in requests), default=0)
        if most <= 0 or (self._price is not None and not self._price.allows_drafts):
            return 0
        times = self._timer.times()
        plain_s = plain_step_s(times, self._price, num_requests, num_context)
        if not plain_s and self._price is not None:
            return 0
        device_pass_s = self._pass_s(len(requests))
        if not plain_s or (self._beyond_s is None and not device_pass_s):
            # Both are measured with the first drafts.
            return 1
        beyond_s = max(0.0, self._beyond_s or 0.0)
        once_s, pass_s = (beyond_s, device_pass_s) if device_pass_s else (0.0, beyond_s)
        if self._price is None:
            plain_s = max(LEAST_SHARE * plain_s, plain_s - self._drafting_s)
        limit_s = longest_step_s(plain_s, self._objective_s, self._price)
        num_tokens, num_drafts = float(num_requests), 0
        best, best_rate = 0, num_tokens / plain_s
        for depth in range(1, most + 1):
            chances = [acceptance**depth for acceptance, of_request in requests if of_request >= depth]
            num_tokens, num_drafts = num_tokens + sum(chances), num_drafts + len(chances)
            device_s = plain_s + once_s + depth * pass_s + self._rows_s(num_requests, num_drafts, times)
            if device_s == math.inf:
                break
            step_s, token_share = device_s, 1.0
            if self._price is not None:
                step_s, token_share = self._price.seconds(device_s), self._price.token_share
            is_better = step_s <= limit_s and token_share * num_tokens / step_s > best_rate
            if is_better:
                best, best_rate = depth, token_share * num_tokens / step_s
            if is_better or depth == 1:
                # A probe has one draft too.
                self._device_s, self._num_tokens = device_s, num_tokens
            if step_s > limit_s:
                break
        self.is_probe = not best and self._num_without >= PROBE_STEPS
        return best or int(self.is_probe)

    def timed(self, step: StepTime) -> None:
        """Takes the time of a step."""
        if self._price is not None:
            self._price.passed(step, self._device_s, self._num_tokens)

    def _pass_s(self, num_rows: int) -> float:
        """Returns the device's seconds of a pass, 0 if not measured."""
        return 0.0 if self._costs is None else self._costs.pass_s(num_rows)

    def _rows_s(self, num_requests: int, num_drafts: int, times: ForwardTimes) -> float:
        """Returns the seconds that rows of drafts add to a step."""
        if self._costs is None:
            return num_drafts * times.request_s
        extras = self._costs.extras_s(num_requests, num_drafts)
        return next((seconds for most, seconds in extras if most >= num_drafts), math.inf)
