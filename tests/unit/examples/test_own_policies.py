"""The example of a user's own policies: each is found by its import path and does what it says."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.eviction.table import EVICTION_POLICIES
from tandem.prefill_worker.policies.table import PREFILL_POLICIES
from tandem.router.policies.base import RoutingRequest
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.routing import link
from tests.fakes.scripted_worker import hello


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)


def request(session_id: str) -> RoutingRequest:
    return RoutingRequest("r", 0, (1, 2), (), 5, 0, session_id, "")


def worker(worker_id: str, role: str) -> Worker:
    return Worker(hello(worker_id, role), lambda _: None, lambda _: None, 0.0, 0.0)


def test_a_session_stays_where_it_is_until_its_worker_is_lost() -> None:
    policy: Any = ROUTING_POLICIES.load("own_policies:StickySessions")()
    prefill, decodes = worker("p", "prefill"), [worker("d0", "decode"), worker("d1", "decode")]

    def candidates() -> Candidates:
        prefill.decode_workers.clear()
        link(prefill, *decodes)
        return Candidates({worker.worker_id: worker for worker in (prefill, *decodes)})

    first = policy.choose(candidates(), request("chat"))
    policy.attempt_started(first, request("chat"))
    first.decode.num_assigned = 10
    assert policy.choose(candidates(), request("chat")) == first
    assert policy.choose(candidates(), request("other")) != first
    assert policy.choose(candidates(), request("")) != first
    decodes.remove(first.decode)
    policy.worker_lost(first.decode, "gone")
    assert policy.choose(candidates(), request("chat")) in candidates()


def test_sessions_that_are_made_up_take_no_more_and_more_memory() -> None:
    policy: Any = ROUTING_POLICIES.load("own_policies:StickySessions")()
    pair = Pair(worker("p", "prefill"), worker("d", "decode"))
    for number in range(policy.MAX_NUM_SESSIONS + 5):
        policy.attempt_started(pair, request(f"session {number}"))
    assert len(policy._homes) == policy.MAX_NUM_SESSIONS
    assert "session 4" not in policy._homes and "session 5" in policy._homes


def test_short_prompts_go_first() -> None:
    policy: Any = PREFILL_POLICIES.load("own_policies:ShortestPromptFirst")()
    queue = [SimpleNamespace(token_ids=[0] * n) for n in (7, 2, 5)]
    assert [len(q.token_ids) for q in policy.order(queue, None)] == [2, 5, 7]


def test_what_several_have_used_outlives_a_flood() -> None:
    assert EVICTION_POLICIES.load("own_policies:SegmentedLru")
    kept = {}
    for eviction in ("lru", "own_policies:SegmentedLru"):
        cache = CacheManager(num_pages=8, page_size=1, eviction=eviction)

        def serve(tokens: list[int], cache: CacheManager = cache) -> None:
            handle = cache.acquire_pages(tokens, len(tokens), max_cached_len=len(tokens))
            assert handle is not None
            cache.cache_pages(handle, tokens, len(tokens))
            cache.release_pages(handle)

        for _ in range(3):
            serve([1, 2])
        for stranger in range(100, 140, 2):
            serve([stranger, stranger + 1])
        kept[eviction] = len(cache.peek([1, 2]))
    assert kept == {"lru": 0, "own_policies:SegmentedLru": 2}
