"""The router for a client's next call."""

from tandem.client.targets import AVOID_S, RouterTargets
from tests.fakes.clock import FakeClock

OWN = ["0.0.0.0:7001", "0.0.0.0:7002", "0.0.0.0:7003"]
REACHED = ["cluster:7001", "cluster:7002", "cluster:7003"]


def targets(clock: FakeClock | None = None) -> RouterTargets:
    found = RouterTargets("cluster:50051", clock or FakeClock())
    for address in found.set_routers(OWN):
        found.mark_reached(address)
    return found


def test_until_the_cluster_has_been_asked_there_is_one_address() -> None:
    found = RouterTargets("cluster:50051", FakeClock())
    assert found.must_ask and not found.is_known
    assert [found.next() for _ in range(3)] == ["cluster:50051"] * 3


def test_routers_take_turns_at_the_known_host() -> None:
    found = targets()
    assert not found.must_ask
    calls = [found.next() for _ in range(9)]
    assert sorted(calls) == sorted(REACHED * 3) and set(calls[:3]) == set(REACHED)


def test_conversation_stays_with_its_router_for_every_client() -> None:
    clock = FakeClock()
    first, second = targets(clock), targets(clock)
    sessions = [f"session-{number}" for number in range(300)]
    places = {session: first.next(session) for session in sessions}
    assert {session: second.next(session) for session in sessions} == places
    for address in REACHED:
        assert list(places.values()).count(address) > 60

    first.avoid(REACHED[0])
    moved = {session for session in sessions if first.next(session) != places[session]}
    assert moved == {session for session in sessions if places[session] == REACHED[0]}
    clock.advance(AVOID_S)
    assert {session: first.next(session) for session in sessions} == places


def test_router_addresses_on_several_hosts() -> None:
    own = ["10.0.0.1:7001", "10.0.0.2:7001"]
    assert RouterTargets("cluster:50051").set_routers(own) == own


def test_clients_begin_anywhere() -> None:
    assert len({targets().next() for _ in range(100)}) == 3


def test_single_router_is_called_at_its_address() -> None:
    found = RouterTargets("cluster:50051", FakeClock())
    assert found.set_routers(["0.0.0.0:50051"]) == ["cluster:50051"]
    assert found.next() == "cluster:50051"
    assert found.set_routers([]) == ["cluster:50051"]
    assert found.next() == "cluster:50051"


def test_failed_router_is_avoided_for_a_while() -> None:
    clock = FakeClock()
    found = targets(clock)
    found.avoid(REACHED[0])
    assert {found.next() for _ in range(9)} == set(REACHED[1:])
    clock.advance(AVOID_S)
    assert {found.next() for _ in range(9)} == set(REACHED)


def test_when_all_fail_the_cluster_is_asked_again() -> None:
    clock = FakeClock()
    found = targets(clock)
    for address in REACHED:
        assert not found.must_ask
        found.avoid(address)
    assert found.must_ask and found.next() == "cluster:50051"
    clock.advance(AVOID_S)
    assert not found.must_ask


def test_unreachable_routers_are_left_out() -> None:
    found = RouterTargets("cluster:50051", FakeClock())
    assert found.set_routers(OWN) == REACHED
    assert found.next() == "cluster:50051"
    found.mark_reached(REACHED[0])
    assert {found.next() for _ in range(9)} == {REACHED[0]}
    found.mark_reached(REACHED[2])
    assert {found.next() for _ in range(9)} == {REACHED[0], REACHED[2]}
    # Another cluster, with other ports.
    found.set_routers(["0.0.0.0:8001", "0.0.0.0:7003"])
    assert {found.next() for _ in range(9)} == {REACHED[2]}
