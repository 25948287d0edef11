"""Linked peers as routers come and go."""

from tandem.messages import Peer
from tandem.peer_union import KEEP_S, PeerUnion
from tests.fakes.clock import FakeClock

D0, D0_AGAIN, D1 = Peer("d0", "life 1", "a:1"), Peer("d0", "life 2", "a:3"), Peer("d1", "life 1", "a:2")


def test_union_of_named_peers() -> None:
    union = PeerUnion(FakeClock())
    assert union.peers() == ()
    union.set_named("r0", [D0])
    union.set_named("r1", [D0, D1])
    assert union.peers() == (D0, D1)
    union.set_named("r1", [D1])
    assert union.peers() == (D0, D1)


def test_new_router_without_peers_removes_no_peer() -> None:
    clock = FakeClock()
    union = PeerUnion(clock)
    union.set_named("r0", [D0, D1])
    union.forget_router("r0")
    union.set_named("r0", [])
    clock.advance(KEEP_S / 2)
    assert set(union.peers()) == {D0, D1}
    union.set_named("r0", [D1])
    clock.advance(KEEP_S)
    assert union.peers() == (D1,)


def test_unnamed_peer_is_dropped_after_a_while() -> None:
    clock = FakeClock()
    union = PeerUnion(clock)
    union.set_named("r0", [D0, D1])
    union.set_named("r1", [D0])
    union.set_named("r0", [D1])
    union.set_named("r1", [])
    clock.advance(KEEP_S - 0.1)
    assert set(union.peers()) == {D0, D1}
    clock.advance(0.2)
    assert union.peers() == (D1,)


def test_unnamed_time_restarts_with_each_naming() -> None:
    clock = FakeClock()
    union = PeerUnion(clock)
    for _ in range(3):
        union.set_named("r0", [D0])
        union.set_named("r0", [])
        clock.advance(KEEP_S - 0.1)
    assert union.peers() == (D0,)


def test_earlier_life_is_dropped_once_all_routers_name_the_later() -> None:
    union = PeerUnion(FakeClock())
    union.set_named("r0", [D0])
    union.set_named("r1", [D0])
    union.set_named("r0", [D0_AGAIN])
    assert set(union.peers()) == {D0, D0_AGAIN}
    union.set_named("r1", [D0_AGAIN])
    assert union.peers() == (D0_AGAIN,)
