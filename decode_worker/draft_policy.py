"""Number of drafts of each request and step, by measured acceptance and step times."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from tandem.decode_worker.overlap_price import OverlapPrice, StepTime
from tandem.decode_worker.plain_step import longest_step_s, plain_step_s
from tandem.engine.draft_costs import DraftCosts
from tandem.worker.forward_timer import ForwardTimer

# Drafts of a request in a step at most: eight rows with its last token.
MAX_DRAFTS = 7
# Whether there are drafts again behind a wrong one, before the first observation, and weight of an observation in the
# mean of all requests.
RENEWAL_START, RENEWAL_WEIGHT = 0.5, 1 / 128
# Least gain for which a step waits for the tokens in flight, and its addition for one request. With fewer requests,
# acceptance is less certain.
ENTRY_GAIN, ENTRY_DOUBT = 1.05, 0.25
# Less likely drafts gain nothing worth their host time.
LEAST_CHANCE = 0.02


class DraftPolicy:
    """Takes the drafts that raise the expected tokens per second of the whole step.

    The chance of a request's n-th draft is its acceptance to the n-th power, and the likeliest drafts go first. Drafts
    that are proposed but not computed are observed too, so acceptance costs no forward pass, and wrong drafts end by
    themselves.

    A step with drafts follows known tokens, so it does not overlap with others, which is part of its price.
    """

    def __init__(
        self,
        timer: ForwardTimer,
        itl_objective_s: float,
        costs: DraftCosts | None = None,
        price: OverlapPrice | None = None,
    ) -> None:
        """
        Args:
            costs: None if a draft takes as long as a request's row.
            price: None if steps do not overlap anyway.
            itl_objective_s: expected time of a step with drafts at most; 0 for no limit. A step that misses it without
                drafts has no limit.
        """
        self._timer = timer
        self._objective_s = itl_objective_s
        self._renewal = RENEWAL_START
        self._costs = costs
        self._price = price
        # Of the last step for which drafts were chosen: on the device, and expected.
        self._device_s = self._num_tokens = 0.0

    def renewed(self, *, has_drafts: bool) -> None:
        """Counts a request whose last drafts were wrong. Args: has_drafts: whether it has new ones."""
        self._renewal += RENEWAL_WEIGHT * (has_drafts - self._renewal)

    def choose(
        self, proposals: Sequence[tuple[float, int]], num_requests: int, num_context: int, *, num_unknown: int = 0
    ) -> list[int]:
        """Returns the number of drafts to compute of each proposal; none before the first measured step.

        Args:
            proposals: acceptance and number of drafts.
            num_requests: of the step, also those without a proposal.
            num_context: attended tokens, summed over the requests.
            num_unknown: 1 if the host does not know the token before the drafts, which is each proposal's first. If it
                is wrong, there may be new drafts.
        """
        counts = [0] * len(proposals)
        if not proposals:
            return counts
        times = self._timer.times()
        step_s = plain_step_s(times, self._price, num_requests, num_context)
        if not step_s or (self._price is not None and not self._price.allows_drafts):
            return counts
        limit_s = longest_step_s(step_s, self._objective_s, self._price)
        chances = []
        for number, (acceptance, num_drafts) in enumerate(proposals):
            chance = acceptance + (1.0 - acceptance) * self._renewal if num_unknown else 1.0
            for _ in range(num_drafts - num_unknown):
                chance *= acceptance
                if chance < LEAST_CHANCE:
                    break
                chances.append((chance, number))
        chances.sort(reverse=True)
        # With each number of drafts.
        num_tokens = [*accumulate((chance for chance, _ in chances), initial=float(num_requests))]
        token_share = 1.0 if self._price is None else self._price.token_share
        least_gain = ENTRY_GAIN + ENTRY_DOUBT / num_requests**0.5 if num_unknown else 1.0
        best, best_rate = 0, least_gain * num_requests / step_s
        for num_drafts, extra_s in self._extras_s(num_requests, len(chances), times.request_s):
            device_s = step_s + extra_s
            seconds = device_s if self._price is None else self._price.seconds(device_s)
            if seconds > limit_s:
                break
            rate = token_share * num_tokens[num_drafts] / seconds
            if rate > best_rate:
                best, best_rate = num_drafts, rate
                self._device_s, self._num_tokens = device_s, num_tokens[num_drafts]
        for _, number in chances[:best]:
            counts[number] += 1
        return counts

    def step_s(self, num_requests: int) -> float | None:
        """Returns the time of a step without drafts where steps overlap; None if it is not known."""
        return self._price.plain_s(num_requests) if self._price is not None and num_requests else None

    def timed(self, step: StepTime) -> None:
        """Takes the time of a step."""
        if self._price is not None:
            self._price.passed(step, self._device_s, self._num_tokens)

    def _extras_s(self, num_requests: int, most: int, request_s: float) -> Iterable[tuple[int, float]]:
        """Yields numbers of drafts and the seconds that they add to a step."""
        if self._costs is None:
            return ((num_drafts, num_drafts * request_s) for num_drafts in range(1, most + 1))
        return self._costs.extras_s(num_requests, most)
