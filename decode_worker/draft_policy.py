"""Number of drafts of each request and step, by measured acceptance and step times."""

from collections.abc import Sequence

from tandem.worker.forward_timer import ForwardTimer

# Drafts of a request in a step at most: eight rows with its last token.
MAX_DRAFTS = 7
# Acceptance before the first observation.
START = 0.5
# Weight of an observation in a request's mean, and in that of all requests.
WEIGHT, SHARED_WEIGHT = 1 / 8, 1 / 64
# Share of the ITL objective that an expected step may fill.
FILLED = 0.9


class DraftPolicy:
    """Takes the drafts that raise the expected tokens per second of the whole step.

    A draft raises them if its chance of acceptance, over its time, exceeds the step's tokens over the step's time. The
    chance of a request's n-th draft is its acceptance to the n-th power. Drafts that are proposed but not computed are
    observed too, so acceptance costs no forward pass, and wrong drafts end by themselves.
    """

    def __init__(self, timer: ForwardTimer, itl_objective_s: float) -> None:
        """
        Args:
            itl_objective_s: expected time of a step with drafts at most; 0 for no limit. A step that misses it without
                drafts has no limit.
        """
        self._timer = timer
        self._objective_s = itl_objective_s
        self._usual: dict[str, float] = {}

    def usual_acceptance(self, source: str) -> float:
        """Returns the mean of all requests, which a new one is expected to have."""
        return self._usual.get(source, START)

    def observe(self, source: str, acceptance: float, proposed: Sequence[int], sampled: Sequence[int]) -> float:
        """Returns a request's acceptance after the tokens that followed its last proposal are known."""
        usual = self.usual_acceptance(source)
        for draft, token in zip(proposed, sampled, strict=False):
            is_right = draft == token
            acceptance += WEIGHT * (is_right - acceptance)
            usual += SHARED_WEIGHT * (is_right - usual)
            if not is_right:
                break
        self._usual[source] = usual
        return acceptance

    def choose(self, proposals: Sequence[tuple[float, int]], num_requests: int, num_context: int) -> list[int]:
        """Returns the number of drafts to compute of each proposal; none before the first measured step.

        Args:
            proposals: acceptance and number of drafts.
            num_requests: of the step, also those without a proposal.
            num_context: attended tokens, summed over the requests.
        """
        counts = [0] * len(proposals)
        times = self._timer.times()
        if not times.step_s:
            return counts
        step_s = times.step_s + num_requests * times.request_s + num_context * times.kv_token_s
        draft_s = times.request_s
        limit_s = FILLED * self._objective_s
        if step_s >= limit_s:
            limit_s = float("inf")
        num_tokens = float(num_requests)
        chances = [
            (acceptance**depth, number)
            for number, (acceptance, num_drafts) in enumerate(proposals)
            for depth in range(1, num_drafts + 1)
        ]
        for chance, number in sorted(chances, reverse=True):
            if chance * step_s <= num_tokens * draft_s or step_s + draft_s > limit_s:
                break
            counts[number] += 1
            num_tokens += chance
            step_s += draft_s
        return counts
