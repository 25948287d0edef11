import pytest

from tandem.router.errors import InternalError
from tandem.router.policies.base import RoutingPolicy, RoutingRequest
from tandem.router.policies.guard import MAX_REASONS, OTHER, GuardedPolicy
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Estimate, Pair
from tests.fakes.routing import RecordingPolicy, make_candidates, routing_request


def test_failed_choice_raises_and_logs_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = RecordingPolicy()
    policy.fail_in.add("choose")
    with pytest.raises(InternalError, match=r"the routing policy failed to choose workers; the router's log says why"):
        GuardedPolicy(policy).choose(make_candidates(1, 1), routing_request(request_id="r7"))
    assert "r7" in caplog.text and "RuntimeError: a mistake in choose" in caplog.text


@pytest.mark.parametrize("other", [None, "p0", make_candidates(1, 1)[0]])
def test_choice_outside_candidates_is_refused(other: object, caplog: pytest.LogCaptureFixture) -> None:
    class Confused(RoutingPolicy):
        def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
            return other  # type: ignore[return-value]

    with pytest.raises(InternalError):
        GuardedPolicy(Confused()).choose(make_candidates(1, 1), routing_request())
    assert "which is not one of the candidates" in caplog.text


@pytest.mark.parametrize(
    "hook", ["attempt_started", "attempt_failed", "request_finished", "worker_lost", "worker_joined"]
)
def test_raising_hook_is_logged(hook: str, caplog: pytest.LogCaptureFixture) -> None:
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


def test_hooks_are_optional() -> None:
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


class Estimating(RoutingPolicy):
    def __init__(self, estimate: object) -> None:
        self.estimate = estimate

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        return Pair(candidates[0].prefill, candidates[0].decode, self.estimate)  # type: ignore[arg-type]


class Raising:
    @property
    def num_to_store(self) -> int:
        raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    "estimate",
    [
        "soon",
        7,
        Raising(),
        Estimate(4),
        Estimate(-1),
        Estimate(1.5),  # type: ignore[arg-type]
        Estimate("1"),  # type: ignore[arg-type]
        Estimate(float("nan")),  # type: ignore[arg-type]
        Estimate(1, num_to_store=99),
        Estimate(1, num_elsewhere=99),
        Estimate(1, reason=None),  # type: ignore[arg-type]
        Estimate(1, reason=["compute"]),  # type: ignore[arg-type]
        Estimate(1, reason="x" * 65),
        Estimate(1, ttft_s=float("nan")),
        Estimate(1, ttft_s=float("inf")),
        Estimate(1, ttft_s=-1.0),
        Estimate(1, itl_s="soon"),  # type: ignore[arg-type]
        Estimate(1, itl_s=None),  # type: ignore[arg-type]
    ],
)
def test_wrong_estimate_is_dropped(estimate: object, caplog: pytest.LogCaptureFixture) -> None:
    candidates = make_candidates(1, 1)
    pair = GuardedPolicy(Estimating(estimate)).choose(candidates, routing_request((1, 2, 3), request_id="r7"))
    assert pair == candidates[0] and pair.estimate is None
    assert "wrong estimate for request r7" in caplog.text


def test_right_estimate_is_kept() -> None:
    estimate = Estimate(2, "compute", 0.5, 0.02, 0, 3)
    assert GuardedPolicy(Estimating(estimate)).choose(make_candidates(1, 1), routing_request()).estimate == estimate

    class Float(float):
        """A library's number type."""

    plain = GuardedPolicy(Estimating(Estimate(2, itl_s=Float(0.5), num_elsewhere=3))).choose(
        make_candidates(1, 1), routing_request()
    )
    assert plain.estimate is not None and type(plain.estimate.itl_s) is float and plain.estimate.num_elsewhere == 3
    # A time close to 0 would give an unbounded ratio.
    tiny = GuardedPolicy(Estimating(Estimate(3, ttft_s=1e-300))).choose(make_candidates(1, 1), routing_request())
    assert tiny.estimate == Estimate(3)


def test_number_of_reasons_is_limited() -> None:
    policy, candidates = Estimating(None), make_candidates(1, 1)
    guarded, reasons = GuardedPolicy(policy), set()
    for number in range(3 * MAX_REASONS):
        policy.estimate = Estimate(1, f"because of {number}")
        estimate = guarded.choose(candidates, routing_request()).estimate
        assert estimate is not None
        reasons.add(estimate.reason)
    assert len(reasons) == MAX_REASONS + 1 and OTHER in reasons
