import math
from dataclasses import replace

import pytest

from tandem.messages import ForwardTimes, WorkerStats
from tandem.pagestore.client.compute_time import expected_compute_s

IDLE = WorkerStats(forward_times=ForwardTimes(prefill_s=1.0, prompt_token_s=0.1, attended_token_s=0.01))


def test_the_time_grows_with_new_and_with_cached_tokens() -> None:
    assert expected_compute_s(IDLE, 0, 10) == 1.0 + 1.0 + 0.5
    assert expected_compute_s(IDLE, 100, 10) == 1.0 + 1.0 + 0.5 + 10.0


def test_the_uncached_share_of_the_queue_counts() -> None:
    queued = replace(IDLE, num_queued_tokens=200)
    assert expected_compute_s(queued, 0, 10) == 20.0 + expected_compute_s(IDLE, 0, 10)
    mostly_cached = replace(queued, prompt_tokens_computed=100, prefix_cached_tokens=300)
    assert expected_compute_s(mostly_cached, 0, 10) == pytest.approx(5.0 + expected_compute_s(IDLE, 0, 10))


def test_a_worker_that_has_measured_nothing_loads() -> None:
    unmeasured = WorkerStats(forward_times=ForwardTimes(step_s=1.0), num_queued_tokens=9)
    assert expected_compute_s(unmeasured, 0, 1) == math.inf
