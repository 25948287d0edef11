"""A policy that fails costs one request, or nothing."""

import pytest

from router.candidates import Candidates
from router.errors import InternalError
from router.policies.base import RoutingPolicy, RoutingRequest
from router.policies.guard import GuardedPolicy
from router.worker import Pair
from tests.fakes.routing import RecordingPolicy, make_candidates, routing_request


def test_a_failed_choice_is_an_error_for_the_client_and_a_traceback_for_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = RecordingPolicy()
    policy.fail_in.add("choose")
    with pytest.raises(InternalError, match=r"the routing policy failed to choose workers; the router's log says why"):
        GuardedPolicy(policy).choose(make_candidates(1, 1), routing_request(request_id="r7"))
    assert "r7" in caplog.text and "RuntimeError: a mistake in choose" in caplog.text


@pytest.mark.parametrize("other", [None, "p0", make_candidates(1, 1)[0]])
def test_what_is_no_candidate_is_no_choice(other: object, caplog: pytest.LogCaptureFixture) -> None:
    class Confused(RoutingPolicy):
        def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
            return other  # type: ignore[return-value]

    with pytest.raises(InternalError):
        GuardedPolicy(Confused()).choose(make_candidates(1, 1), routing_request())
    assert "which is none of the pairs that it was given" in caplog.text


@pytest.mark.parametrize(
    "hook", ["attempt_started", "attempt_failed", "request_finished", "worker_lost", "worker_joined"]
)
def test_a_hook_that_raises_is_logged(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    policy = RecordingPolicy()
    policy.fail_in.add(hook)
    guarded, (pair,), request = GuardedPolicy(policy), make_candidates(1, 1), routing_request()
    guarded.attempt_started(pair, request)
    guarded.attempt_failed(pair, request, "lease_lost", "gone")
    guarded.request_finished(None, request, "failed")
    guarded.worker_lost(pair.prefill, "killed")
    guarded.worker_joined(pair.decode)
    assert policy.calls == [
        ("attempt_started", pair, request),
        ("attempt_failed", pair, request, "lease_lost", "gone"),
        ("request_finished", None, request, "failed"),
        ("worker_lost", pair.prefill, "killed"),
        ("worker_joined", pair.decode),
    ]
    (record,) = caplog.records
    assert record.getMessage() == f"the routing policy failed in {hook}" and record.exc_info


def test_a_policy_need_not_define_any_hook() -> None:
    class First(RoutingPolicy):
        def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
            return candidates[0]

    guarded, candidates, request = GuardedPolicy(First()), make_candidates(1, 1), routing_request()
    pair = guarded.choose(candidates, request)
    assert pair == candidates[0]
    guarded.attempt_started(pair, request)
    guarded.attempt_failed(pair, request, "deferred", "")
    guarded.request_finished(pair, request, "aborted")
    guarded.worker_lost(pair.prefill, "")
    guarded.worker_joined(pair.prefill)
