"""The peers to link to, as routers come and go."""

from tandem.messages import Peer
from tandem.worker.peer_union import KEEP_S, PeerUnion
from tests.fakes.clock import FakeClock

D0, D0_AGAIN, D1 = Peer("d0", "life 1", "a:1"), Peer("d0", "life 2", "a:3"), Peer("d1", "life 1", "a:2")


def test_the_union_of_what_routers_name() -> None:
    union = PeerUnion(FakeClock())
    assert union.peers() == ()
    union.set_named("r0", [D0])
    union.set_named("r1", [D0, D1])
    assert union.peers() == (D0, D1)
    union.set_named("r1", [D1])
    assert union.peers() == (D0, D1)


def test_a_new_router_that_knows_nobody_yet_removes_nobody() -> None:
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


def test_whom_nobody_names_is_dropped_after_a_while() -> None:
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


def test_the_time_without_a_name_begins_anew_with_each() -> None:
    clock = FakeClock()
    union = PeerUnion(clock)
    for _ in range(3):
        union.set_named("r0", [D0])
        union.set_named("r0", [])
        clock.advance(KEEP_S - 0.1)
    assert union.peers() == (D0,)


def test_an_earlier_life_goes_at_once_when_all_name_the_later() -> None:
    union = PeerUnion(FakeClock())
    union.set_named("r0", [D0])
    union.set_named("r1", [D0])
    union.set_named("r0", [D0_AGAIN])
    assert set(union.peers()) == {D0, D0_AGAIN}
    union.set_named("r1", [D0_AGAIN])
    assert union.peers() == (D0_AGAIN,)
