"""Prefetches that wait for each other."""

from tandem.engine.kvcache.cache_manager import NO_PREFIX
from tandem.pagestore.client.prefetch import Prefetch
from tandem.pagestore.client.shared_loads import SharedLoads
from tandem.pagestore.messages import HOST

KEYS = [b"a", b"b", b"c", b"d"]


def prefetch(name: str, keys: list[bytes], base: int = 0) -> Prefetch:
    made = Prefetch((name, 0, "prefill"), [], "", 0, (0, 0), 1.0, 1.0, base + len(keys), NO_PREFIX, base)
    made.keys = keys
    return made


def leading(shared: SharedLoads, keys: list[bytes], base: int = 0) -> Prefetch:
    leader = prefetch("leader", keys, base)
    leader.find = 1
    shared.lead(leader)
    return leader


def test_follower_waits_for_the_shared_pages_only() -> None:
    shared = SharedLoads()
    leader = leading(shared, KEYS)
    follower = prefetch("follower", [*KEYS[1:3], b"x"], base=1)
    assert shared.follow(follower)
    assert follower.shared_end == 3
    leader.num_entered = 2
    assert shared.take_free() == []
    leader.num_entered = 3
    leader.loaded = {0: HOST, 1: HOST, 2: HOST, 3: HOST}
    assert shared.take_free() == [follower] and shared.take_free() == []
    assert follower.loaded == {1: HOST, 2: HOST}
    assert follower.keys == [] and follower.leader is None
    assert shared.check_integrity() == ""


def test_nothing_to_follow() -> None:
    shared = SharedLoads()
    leader = leading(shared, KEYS)
    assert not shared.follow(prefetch("other", [b"x"]))
    leader.num_entered = 2
    assert not shared.follow(prefetch("late", KEYS[:2]))
    leader.is_over = True
    assert not shared.follow(prefetch("later", KEYS))
    leader.is_over = False
    shared.end_lead(leader)
    assert not shared.follow(prefetch("last", KEYS))


def test_follower_is_free_when_its_leader_has_ended() -> None:
    shared = SharedLoads()
    leader = leading(shared, KEYS)
    first, second = prefetch("first", [*KEYS]), prefetch("second", [*KEYS])
    assert shared.follow(first) and shared.follow(second)
    shared.end_follow(first)
    shared.end_follow(first)
    shared.end_lead(leader)
    leader.find = None
    assert shared.take_free() == [second]


def test_violations_are_found() -> None:
    shared = SharedLoads()
    leader = leading(shared, KEYS)
    follower = prefetch("follower", [*KEYS])
    assert shared.follow(follower) and shared.check_integrity() == ""
    follower.is_over = True
    assert "follows another" in shared.check_integrity()
    leader.find = None
    assert "without a find" in shared.check_integrity()
