"""A request's work in seconds of one worker, for loads in multiples of a worker and for first guesses."""

from collections.abc import Sequence

from benchmarks.elastic.clients import Arrival
from benchmarks.elastic.step_times import StepTimes

# Sequences of the step that a request shares.
BATCH = 32


def work_s(arrival: Arrival, times: StepTimes) -> float:
    """Returns the time of its prompt alone, and its share of decode steps."""
    num_tokens, num_output = arrival.num_prompt_tokens, arrival.num_output_tokens
    return alone_s(times, num_tokens) + num_output * (
        times.decode[BATCH] / BATCH + times.kv_token_s * (num_tokens + num_output / 2)
    )


def alone_s(times: StepTimes, num_tokens: int) -> float:
    """Returns the time of a prompt at an idle worker, in one forward pass."""
    return times.prefill(num_tokens, num_tokens * num_tokens / 2)


def worker_rate(requests: Sequence[Arrival], times: StepTimes) -> float:
    """Returns the requests/s that fill a worker, without cached prefixes."""
    return len(requests) / sum(work_s(request, times) for request in requests)
