"""The pair that has least left to do for this very request."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.prefix import prefix_identities
from tandem.router.policies.base import RequestEnd, RoutingRequest
from tandem.router.policies.cache_aware import CacheAware
from tandem.router.policies.under_way import LAST_WORD_S
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.clock import FakeClock
from tests.fakes.routing import assign_load, make_candidates, routing_request


def caches(worker: Worker, token_ids: Sequence[int], namespace: str = "") -> None:
    """The worker says that it has these now."""
    worker.prefixes.identities.update(prefix_identities(token_ids, worker.page_size, namespace))
    worker.prefixes.num_messages += 1


def evicts_all(worker: Worker) -> None:
    worker.prefixes.identities.clear()
    worker.prefixes.num_messages += 1


class Served:
    """A policy that is called as the router does; nothing counts as load."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self.clock = FakeClock()
        self.policy = CacheAware(seed=1, clock=self.clock)
        self.candidates: Candidates = make_candidates(num_prefill, num_decode)
        self._numbers = itertools.count()

    def start(self, token_ids: Sequence[int], **fields: Any) -> tuple[Pair, RoutingRequest]:
        request = routing_request(token_ids, **{"request_id": f"r{next(self._numbers)}", **fields})
        pair = self.policy.choose(self.candidates, request)
        self.policy.attempt_started(pair, request)
        return pair, request

    def would_choose(self, token_ids: Sequence[int], **fields: Any) -> Pair:
        return self.policy.choose(self.candidates, routing_request(token_ids, **fields))

    def prefers(self, worker: Worker, token_ids: Sequence[int], **fields: Any) -> bool:
        """Whether it is chosen always, and not by chance."""
        chosen = {self.would_choose(token_ids, **fields) for _ in range(20)}
        return all(worker in (pair.prefill, pair.decode) for pair in chosen)


def test_a_prefix_goes_where_a_worker_says_that_it_is() -> None:
    served = Served(3, 3)
    prefill, decode = served.candidates[4].prefill, served.candidates[4].decode
    caches(prefill, range(400))
    assert served.prefers(prefill, range(410))
    caches(decode, range(400))
    assert served.prefers(decode, range(410))
    evicts_all(prefill)
    assert not served.prefers(prefill, range(410))


def test_of_workers_with_equal_load_the_one_that_computes_a_prefix_already_is_chosen() -> None:
    served = Served(3, 3)
    homes = {name: assign_load(served.start([ord(name)] * 400)[0], 400) for name in "abc"}
    assert len({home.prefill.worker_id for home in homes.values()}) == 3
    for worker in {w for pair in served.candidates for w in (pair.prefill, pair.decode)}:
        worker.num_assigned = worker.num_pending_tokens = 0
    for name, home in homes.items():
        assert served.start([*[ord(name)] * 400, 7, 7, 7, 7])[0] == home


def test_a_cached_prefix_is_not_worth_a_long_queue() -> None:
    served = Served(2, 1)
    home = served.candidates[0]
    caches(home.prefill, range(400))
    home.prefill.num_pending_tokens = 300
    assert served.prefers(home.prefill, range(400))
    home.prefill.num_pending_tokens = 500
    assert served.prefers(served.candidates[1].prefill, range(400))


def test_a_worker_s_own_word_counts_once_it_has_spoken() -> None:
    """What it has told of and then evicts is gone, though the request that it was computed for is still decoded."""
    served = Served(2, 1)
    home = served.start(range(400))[0].prefill
    caches(home, range(200))
    assert served.prefers(home, range(400))
    caches(home, range(400))
    assert served.prefers(home, range(400))
    evicts_all(home)
    assert not served.prefers(home, range(400))


@pytest.mark.parametrize("end", ["stopped", "failed", "aborted"])
def test_what_did_not_come_to_its_end_is_not_expected(end: RequestEnd) -> None:
    served = Served(2, 2)
    pair, request = served.start(range(4000))
    served.policy.request_finished(pair, dataclasses.replace(request, output_ids=(1, 2)), end)
    assert not served.prefers(pair.prefill, range(4000))
    assert not served.prefers(pair.decode, range(4000))


def test_a_failed_attempt_is_not_expected_to_leave_anything() -> None:
    served = Served(2, 2)
    pair, request = served.start(range(400), request_id="same")
    served.policy.attempt_failed(pair, request, "prefill_failed", "no luck")
    assert not served.prefers(pair.prefill, range(400))
    again, request = served.start(range(400), request_id="same", attempt=1)
    assert served.prefers(again.prefill, range(400))
    served.policy.attempt_failed(again, request, "worker_lost", "gone")
    served.policy.request_finished(None, request, "failed")
    assert not served.prefers(again.prefill, range(400))


def test_the_output_is_expected_where_it_was_decoded_until_the_worker_has_had_its_say() -> None:
    served = Served(1, 2)
    pair, request = served.start(range(2000))
    ended = dataclasses.replace(request, output_ids=tuple(range(2000, 4000)))
    served.policy.request_finished(pair, ended, "finished")
    caches(pair.decode, range(2000))
    other = next(p.decode for p in served.candidates if p.decode is not pair.decode)
    caches(other, range(2400))
    assert served.prefers(pair.decode, range(4000))
    served.clock.advance(LAST_WORD_S + 0.1)
    assert served.prefers(other, range(4000))


def test_a_single_token_leaves_nothing_at_the_decode_worker() -> None:
    served = Served(1, 2)
    pair, request = served.start(range(4000))
    served.policy.request_finished(pair, dataclasses.replace(request, output_ids=(7,)), "finished")
    assert not served.prefers(pair.decode, range(4000))


def test_a_lost_worker_s_next_life_is_expected_to_have_nothing() -> None:
    served = Served(2, 1)
    home = served.start(range(400))[0].prefill
    served.policy.worker_lost(home, "gone")
    assert not served.prefers(home, range(400))


def test_namespaces_do_not_attract_each_other() -> None:
    served = Served(2, 1)
    home = served.start(range(400), cache_namespace="one")[0].prefill
    home.num_pending_tokens = 10
    assert served.prefers(home, range(400), cache_namespace="one")
    assert not served.prefers(home, range(400), cache_namespace="two")


def test_output_so_far_is_part_of_what_an_attempt_needs() -> None:
    served = Served(2, 1)
    home = served.candidates[1].prefill
    caches(home, range(400))
    home.num_pending_tokens = 10
    assert served.prefers(home, range(200), attempt=1, output_ids=tuple(range(200, 400)))


def test_workers_may_have_pages_of_different_sizes() -> None:
    served = Served(2, 1)
    large = served.candidates[1].prefill
    large.hello = dataclasses.replace(large.hello, page_size=16)
    caches(large, range(400))
    assert served.prefers(large, range(400))
    caches(served.candidates[0].prefill, range(200))
    assert served.prefers(large, range(400))
    evicts_all(large)
    assert served.prefers(served.candidates[0].prefill, range(400))
