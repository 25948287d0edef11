import pytest

from tandem.router.config import RouterConfig
from tandem.router.errors import OverloadedError
from tandem.router.frontends.access import Access, key_digest
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.router.workers.peer_counts import FRESH_S, NOTHING, AssignedLoad, PeerCounts, RouterCounts
from tests.fakes.clock import FakeClock


def test_counts_are_summed() -> None:
    counts = PeerCounts(FakeClock())
    assert (counts.num_requests, counts.num_queued, counts.assigned_to("p")) == (0, 0, NOTHING)
    counts.record("r1", RouterCounts(5, 2, {"a": 3}, {"p": AssignedLoad(4, 100)}))
    counts.record("r2", RouterCounts(7, 1, {"a": 1, "b": 6}, {"p": AssignedLoad(1, 10), "d": AssignedLoad(2, 0)}))
    assert (counts.num_requests, counts.num_queued) == (12, 3)
    assert [counts.num_requests_of(key) for key in ("a", "b", "c")] == [4, 6, 0]
    assert [counts.assigned_to(name) for name in ("p", "d", "x")] == [AssignedLoad(5, 110), AssignedLoad(2), NOTHING]
    counts.record("r1", RouterCounts(0, 0))
    assert (counts.num_requests, counts.num_requests_of("a")) == (7, 1)


def test_silent_router_counts_as_empty() -> None:
    clock = FakeClock()
    counts = PeerCounts(clock)
    counts.record("r1", RouterCounts(5, 2))
    clock.advance(FRESH_S - 0.1)
    assert counts.num_queued == 2 and counts.counts_of("r1") is not None
    clock.advance(0.2)
    assert counts.num_queued == 0 and counts.counts_of("r1") is None


def test_forgotten_router_counts_as_empty() -> None:
    counts = PeerCounts(FakeClock())
    counts.record("r1", RouterCounts(5, 2))
    counts.forget("r1")
    counts.forget("r2")
    assert counts.num_requests == 0


def test_queue_limit_is_cluster_wide() -> None:
    router = Router(RouterConfig("nowhere", "fake", 100, max_queued_requests=4), LeastLoaded(), FakeClock())
    router.elsewhere.record("r1", RouterCounts(9, 3))
    router.check_capacity(1)
    with pytest.raises(OverloadedError, match="3 requests wait"):
        router.check_capacity(2)


def test_key_limit_is_cluster_wide() -> None:
    counts = PeerCounts(FakeClock())
    access = Access(["key", "other"], 3, counts)
    counts.record("r1", RouterCounts(9, 0, {key_digest("key"): 2}))
    with access.hold("other", 3):
        assert access.num_requests_by_key() == {key_digest("other"): 3}
    with access.hold("key"), pytest.raises(OverloadedError, match="3 requests of this key are in hand"):
        access.hold("key").__enter__()
    # A request that just ended elsewhere still counts, and must not refuse the client's next one.
    counts.record("r1", RouterCounts(9, 0, {key_digest("key"): 3}))
    with access.hold("key"), pytest.raises(OverloadedError, match="4 requests of this key are in hand"):
        access.hold("key").__enter__()
    assert "key" not in key_digest("key")


def test_only_changed_loads_are_passed_on() -> None:
    """With 1,000 workers and 16 routers, 150 reports come each second, and most workers are in all of them."""
    clock = FakeClock()
    counts = PeerCounts(clock)
    many = {f"w{i}": AssignedLoad(1) for i in range(1000)}
    counts.record("r1", RouterCounts(0, 0, assigned=many))
    counts.record("r2", RouterCounts(0, 0, assigned=many))
    assert len(counts.take_changed()) == 1000
    counts.record("r1", RouterCounts(0, 0, assigned={"w7": AssignedLoad(4), "w8": NOTHING}), is_change=True)
    assert counts.take_changed() == {"w7": AssignedLoad(5), "w8": AssignedLoad(1)}
    counts.record("r2", RouterCounts(0, 0, assigned=many))
    assert counts.take_changed() == {}
    counts.record("r2", RouterCounts(0, 0, assigned={"w7": AssignedLoad(1)}))
    assert len(counts.take_changed()) == 999 and counts.assigned_to("w8") == NOTHING
    counts.record("r1", RouterCounts(0, 0))
    clock.advance(FRESH_S)
    counts.record("r3", RouterCounts(0, 0))
    counts.forget_silent()
    assert set(counts.take_changed()) == {f"w{i}" for i in range(1000)} - {"w8"}
    assert counts.assigned_to("w7") == NOTHING and counts.counts_of("r3") is not None
