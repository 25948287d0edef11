import dataclasses
import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.messages import CachedPrefixes, WorkerStats
from tandem.prefix import prefix_identities
from tandem.router.policies.base import RequestEnd, RoutingRequest
from tandem.router.policies.cache_aware import CacheAware
from tandem.router.policies.under_way import LAST_WORD_S
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.store_prefixes import StorePrefixes
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.clock import FakeClock
from tests.fakes.routing import assign_load, make_candidates, routing_request


def caches(worker: Worker, token_ids: Sequence[int], namespace: str = "") -> None:
    worker.prefixes.identities.update(prefix_identities(token_ids, worker.page_size, namespace))
    worker.prefixes.num_messages += 1


def evicts_all(worker: Worker) -> None:
    worker.prefixes.identities.clear()
    worker.prefixes.num_messages += 1


class Served:
    """Calls a policy as the router does, without load."""

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
        """Returns whether the choice is certain, not random."""
        chosen = {self.would_choose(token_ids, **fields) for _ in range(20)}
        return all(worker in (pair.prefill, pair.decode) for pair in chosen)


def test_prefix_goes_to_worker_that_reports_it() -> None:
    served = Served(3, 3)
    prefill, decode = served.candidates[4].prefill, served.candidates[4].decode
    caches(prefill, range(400))
    assert served.prefers(prefill, range(410))
    caches(decode, range(400))
    assert served.prefers(decode, range(410))
    evicts_all(prefill)
    assert not served.prefers(prefill, range(410))


def test_equal_load_prefers_worker_computing_the_prefix() -> None:
    served = Served(3, 3)
    homes = {name: assign_load(served.start([ord(name)] * 400)[0], 400) for name in "abc"}
    assert len({home.prefill.worker_id for home in homes.values()}) == 3
    for worker in {w for pair in served.candidates for w in (pair.prefill, pair.decode)}:
        worker.num_assigned = worker.num_pending_tokens = 0
    for name, home in homes.items():
        assert served.start([*[ord(name)] * 400, 7, 7, 7, 7])[0] == home


def test_long_queue_outweighs_cached_prefix() -> None:
    served = Served(2, 1)
    home = served.candidates[0]
    caches(home.prefill, range(400))
    home.prefill.num_pending_tokens = 300
    assert served.prefers(home.prefill, range(400))
    home.prefill.num_pending_tokens = 500
    assert served.prefers(served.candidates[1].prefill, range(400))


def test_report_replaces_expectation() -> None:
    """A reported and then evicted prefix is gone, even while its request is still decoded."""
    served = Served(2, 1)
    home = served.start(range(400))[0].prefill
    caches(home, range(200))
    assert served.prefers(home, range(400))
    caches(home, range(400))
    assert served.prefers(home, range(400))
    evicts_all(home)
    assert not served.prefers(home, range(400))


@pytest.mark.parametrize("end", ["stopped", "failed", "aborted"])
def test_unfinished_request_leaves_no_expectation(end: RequestEnd) -> None:
    served = Served(2, 2)
    pair, request = served.start(range(4000))
    served.policy.request_finished(pair, dataclasses.replace(request, output_ids=(1, 2)), end)
    assert not served.prefers(pair.prefill, range(4000))
    assert not served.prefers(pair.decode, range(4000))


def test_failed_attempt_leaves_no_expectation() -> None:
    served = Served(2, 2)
    pair, request = served.start(range(400), request_id="same")
    served.policy.attempt_failed(pair, request, "prefill_failed", "no luck")
    assert not served.prefers(pair.prefill, range(400))
    again, request = served.start(range(400), request_id="same", attempt=1)
    assert served.prefers(again.prefill, range(400))
    served.policy.attempt_failed(again, request, "worker_lost", "gone")
    served.policy.request_finished(None, request, "failed")
    assert not served.prefers(again.prefill, range(400))


def test_output_is_expected_at_decode_worker_until_it_reports() -> None:
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


def test_single_token_output_leaves_nothing_at_decode_worker() -> None:
    served = Served(1, 2)
    pair, request = served.start(range(4000))
    served.policy.request_finished(pair, dataclasses.replace(request, output_ids=(7,)), "finished")
    assert not served.prefers(pair.decode, range(4000))


def test_restarted_worker_has_no_expectation() -> None:
    served = Served(2, 1)
    home = served.start(range(400))[0].prefill
    served.policy.worker_lost(home, "gone")
    assert not served.prefers(home, range(400))


def test_namespaces_are_separate() -> None:
    served = Served(2, 1)
    home = served.start(range(400), cache_namespace="one")[0].prefill
    home.num_pending_tokens = 10
    assert served.prefers(home, range(400), cache_namespace="one")
    assert not served.prefers(home, range(400), cache_namespace="two")


def test_output_counts_for_next_attempt() -> None:
    served = Served(2, 1)
    home = served.candidates[1].prefill
    caches(home, range(400))
    home.num_pending_tokens = 10
    assert served.prefers(home, range(200), attempt=1, output_ids=tuple(range(200, 400)))


def test_different_page_sizes() -> None:
    served = Served(2, 1)
    large = served.candidates[1].prefill
    large.hello = dataclasses.replace(large.hello, page_size=16)
    caches(large, range(400))
    assert served.prefers(large, range(400))
    caches(served.candidates[0].prefill, range(200))
    assert served.prefers(large, range(400))
    evicts_all(large)
    assert served.prefers(served.candidates[0].prefill, range(400))


def test_a_stored_prefix_counts_by_its_load_time() -> None:
    served = Served(2, 1)
    prompt = range(400)
    stored = served.candidates.prefill_workers[1]
    prefixes = stored.node_store.prefixes = StorePrefixes(lambda: 1000)
    prefixes.receive(CachedPrefixes(0, True, array("Q", prefix_identities(prompt, stored.page_size, "")).tobytes()))
    token_s = stored.forward_times.prompt_token_s
    for worker in served.candidates.prefill_workers:
        worker.take_stats(WorkerStats(load_token_s=(token_s / 2,)))
    assert served.prefers(stored, prompt)
    # Loading saves 198 of 396 tokens.
    stored.num_pending_tokens = 197
    assert served.prefers(stored, prompt)
    stored.num_pending_tokens = 199
    assert not served.prefers(stored, prompt)
    stored.num_pending_tokens = 0
    stored.take_stats(WorkerStats(load_token_s=(token_s * 2,)))
    assert not served.prefers(stored, prompt)
