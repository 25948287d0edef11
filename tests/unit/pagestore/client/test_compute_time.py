import math

from tandem.messages import ForwardTimes
from tandem.pagestore.client.compute_time import expected_compute_s


def test_the_time_grows_with_new_and_with_cached_tokens() -> None:
    times = ForwardTimes(prefill_s=1.0, prompt_token_s=0.1, attended_token_s=0.01)
    assert expected_compute_s(times, 0, 10) == 1.0 + 1.0 + 0.5
    assert expected_compute_s(times, 100, 10) == 1.0 + 1.0 + 0.5 + 10.0


def test_a_worker_that_has_measured_nothing_loads() -> None:
    assert expected_compute_s(ForwardTimes(step_s=1.0), 0, 1) == math.inf
