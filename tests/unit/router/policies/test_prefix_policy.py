from dataclasses import replace

from tandem.router.policies.base import RoutingRequest
from tandem.router.policies.prefix_policy import PrefixPolicy
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.clock import FakeClock
from tests.fakes.routing import routing_request
from tests.fakes.scripted_worker import hello


class Told(PrefixPolicy):
    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        raise NotImplementedError


def started() -> tuple[Told, Pair, RoutingRequest]:
    one, other = (
        Worker(hello(name, "both", has_links=True), lambda _: None, lambda _: None, 0.0, 0.0) for name in "ab"
    )
    policy, pair, request = Told(FakeClock()), Pair(one, other), routing_request(range(40))
    policy.num_cached([one, other], request)
    policy.attempt_started(pair, request)
    return policy, pair, request


def test_arriving_prefix_is_not_cached() -> None:
    policy, pair, _ = started()
    both = [pair.prefill, pair.decode]
    again = routing_request(range(50), request_id="another")
    assert policy.num_cached(both, again) == ({pair.prefill: 40}, {pair.prefill: 40, pair.decode: 40})


def test_finished_request_is_cached_at_decode_worker() -> None:
    policy, pair, request = started()
    policy.request_finished(pair, replace(request, output_ids=tuple(range(40, 49))), "finished")
    again = routing_request(range(60), request_id="another")
    cached, expected = policy.num_cached([pair.prefill, pair.decode], again)
    assert cached == expected == {pair.prefill: 40, pair.decode: 48}


def test_lost_worker_has_no_expectation() -> None:
    policy, pair, request = started()
    policy.worker_lost(pair.decode, "gone")
    policy.request_finished(pair, replace(request, output_ids=(1, 2)), "finished")
    cached, expected = policy.num_cached([pair.prefill], routing_request(range(60), request_id="another"))
    assert cached == expected == {pair.prefill: 40}
