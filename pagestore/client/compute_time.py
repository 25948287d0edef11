"""The time that loaded pages save."""

import math

from tandem.messages import WorkerStats


def expected_compute_s(stats: WorkerStats, num_cached: int, num_new: int) -> float:
    """Returns the seconds until a worker has computed its queue, and then `num_new` prompt tokens behind `num_cached`
    ones. Infinite before the worker has measured any: it has computed nothing, and loading is the better guess.

    Of the queue's tokens the share is computed that was computed of all prompts so far.
    """
    times = stats.forward_times
    if not times.prompt_token_s:
        return math.inf
    num_attended = num_new * num_cached + num_new * num_new / 2
    num_prompt_tokens = stats.prompt_tokens_computed + stats.prefix_cached_tokens
    share = stats.prompt_tokens_computed / num_prompt_tokens if num_prompt_tokens else 1.0
    queue_s = times.prompt_token_s * stats.num_queued_tokens * share
    return queue_s + times.prefill_s + times.prompt_token_s * num_new + times.attended_token_s * num_attended
