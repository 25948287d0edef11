"""The time that loaded pages save."""

import math

from tandem.messages import ForwardTimes


def expected_compute_s(times: ForwardTimes, num_cached: int, num_new: int) -> float:
    """Returns the seconds to compute `num_new` prompt tokens behind `num_cached` ones. Infinite before the worker has
    measured any: it has computed nothing, and loading is the better guess."""
    if not times.prompt_token_s:
        return math.inf
    num_attended = num_new * num_cached + num_new * num_new / 2
    return times.prefill_s + times.prompt_token_s * num_new + times.attended_token_s * num_attended
