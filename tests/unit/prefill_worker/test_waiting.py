from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Prefill
from tandem.prefill_worker.policies.base import PrefillPolicy
from tandem.prefill_worker.queued_request import QueuedRequest
from tandem.prefill_worker.waiting import MAX_OVERTAKEN, POLICY_WINDOW, WaitingRequests
from tandem.sampling_params import SamplingParams


class YoungestFirst(PrefillPolicy):
    """Attributes: seen: request ids of every ordered queue."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        self.seen.append([q.request.request_id for q in queue])
        return list(reversed(queue))


def prefill(name: str, arrival_ns: int, priority: int = 0, attempt: int = 0) -> Prefill:
    return Prefill(name, attempt, (1, 2), (), SamplingParams(4), "d", arrival_ns, priority)


def waiting(policy: PrefillPolicy | None = None) -> WaitingRequests:
    return WaitingRequests(CacheManager(8, 2), policy or YoungestFirst())


def order(requests: WaitingRequests) -> list[str]:
    return [q.request.request_id for q in requests.start_order()]


def test_policy_orders_equals_given_by_age() -> None:
    policy = YoungestFirst()
    requests = waiting(policy)
    for name, arrival_ns, priority in (("b", 2, 0), ("d", 4, 1), ("a", 1, 0), ("c", 3, 1)):
        requests.enqueue(prefill(name, arrival_ns, priority))
    assert order(requests) == ["d", "c", "b", "a"]
    assert policy.seen == [["c", "d"], ["a", "b"]]


def test_policy_sees_only_its_window() -> None:
    policy = YoungestFirst()
    requests = waiting(policy)
    for i in range(POLICY_WINDOW + 5):
        requests.enqueue(prefill(f"r{i}", i))
    assert len(order(requests)) == len(policy.seen[0]) == POLICY_WINDOW
    assert policy.seen[0][0] == "r0", "the oldest are in it"


def test_often_overtaken_request_goes_before_the_policy() -> None:
    policy = YoungestFirst()
    requests = waiting(policy)
    requests.enqueue(prefill("old", 0))
    for i in range(MAX_OVERTAKEN):
        requests.enqueue(prefill(f"r{i}", 1 + i))
        young, *_ = requests.start_order()
        assert young.request.request_id == f"r{i}"
        requests.dequeue(young)
    requests.enqueue(prefill("young", 1000))
    assert order(requests) == ["old", "young"]
    assert policy.seen[-1] == ["young"]


def test_only_started_requests_overtake_and_only_equals() -> None:
    requests = waiting()
    requests.enqueue(prefill("old", 0))
    requests.enqueue(prefill("urgent", 1, priority=1))
    requests.enqueue(prefill("refused", 2))
    requests.enqueue(prefill("young", 3))
    by_name = {q.request.request_id: q for q in requests.start_order()}
    requests.dequeue(by_name["urgent"])
    requests.drop(by_name["refused"])
    assert by_name["old"].num_overtaken == 0
    requests.dequeue(by_name["young"])
    assert by_name["old"].num_overtaken == 1
    assert len(requests) == 1


def test_an_attempt_is_dropped_by_its_number() -> None:
    requests = waiting()
    requests.enqueue(prefill("r", 0, attempt=1))
    assert not requests.drop_attempt("r", 0)
    assert requests.drop_attempt("r", 1)
    assert not requests.drop_attempt("r", 1) and len(requests) == 0
    requests.enqueue(prefill("a", 0))
