"""The step without drafts, with which choices of drafts compare the others."""

import math

from tandem.decode_worker.overlap_price import OverlapPrice
from tandem.messages import ForwardTimes

# Share of the ITL objective that an expected step may fill.
FILLED = 0.9


def plain_step_s(times: ForwardTimes, price: OverlapPrice | None, num_requests: int, num_context: int) -> float:
    """Returns the expected seconds of a step without drafts; 0 if such steps must be measured first.

    Args:
        times: fit to all steps.
        price: None if steps do not overlap. Else it has measured steps without drafts. The fit knows little of them
            while most steps have drafts, whose rows cost less and which do not overlap.
        num_context: attended tokens, summed over the requests.
    """
    if price is not None:
        return price.plain_s(num_requests) or 0.0
    return times.step_s + num_requests * times.request_s + num_context * times.kv_token_s


def longest_step_s(plain_s: float, itl_objective_s: float, price: OverlapPrice | None) -> float:
    """Returns the most seconds that a step with drafts may be expected to take; inf for no limit.

    Args:
        plain_s: of a step without drafts. If it misses the objective, the objective is no limit.
        itl_objective_s: 0 for none.
    """
    limit_s = FILLED * itl_objective_s
    if plain_s >= limit_s:
        limit_s = math.inf
    return limit_s if price is None else min(limit_s, price.limit_s)
