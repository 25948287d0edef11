"""Places for health watches."""

import pytest

from tandem.router.frontends import watch_places
from tandem.router.frontends.watch_places import (
    MAX_KNOWN_ADDRESSES,
    MAX_WATCHES,
    MAX_WATCHES_PER_ADDRESS,
    MAX_WATCHES_PER_CONNECTION,
    MAX_WATCHES_PER_KNOWN_ADDRESS,
    NUM_RESERVED,
    WatchPlaces,
    address_of,
)

KEY = "Bearer secret"


@pytest.fixture
def places() -> WatchPlaces:
    return WatchPlaces(lambda authorization: authorization == KEY)


def fill(places: WatchPlaces, addresses: list[str], authorization: str | None = None) -> int:
    """Takes all the places that these addresses get, over many connections each. Returns their number."""
    num_taken = 0
    for address in addresses:
        for port in range(1000):
            if places.take(f"ipv4:{address}:{port}", authorization):
                break
            num_taken += 1
    return num_taken


def test_a_connection_has_few(places: WatchPlaces) -> None:
    for authorization in (None, KEY):
        peer = f"ipv4:10.0.0.1:{5 if authorization else 6}"
        for _ in range(MAX_WATCHES_PER_CONNECTION):
            assert places.take(peer, authorization) == ""
        assert places.take(peer, authorization) == "8 calls of Watch are open on this connection: use Check instead"
    assert places.take("ipv4:10.0.0.1:7", None) == ""


def test_an_address_has_its_share(places: WatchPlaces) -> None:
    assert fill(places, ["10.0.0.1"]) == MAX_WATCHES_PER_ADDRESS
    assert places.take("ipv4:10.0.0.1:2000", None) == (
        "128 calls of Watch are open from this address: send a key with further ones, or use Check instead"
    )
    assert places.take("ipv4:10.0.0.1:2000", KEY) == ""
    places.note_key("ipv4:10.0.0.1:3000")
    assert fill(places, ["10.0.0.1"]) == MAX_WATCHES_PER_KNOWN_ADDRESS - MAX_WATCHES_PER_ADDRESS - 1


def test_strangers_leave_room_for_clients_with_a_key(places: WatchPlaces) -> None:
    assert fill(places, [f"10.0.0.{host}" for host in range(100)]) == MAX_WATCHES - NUM_RESERVED
    assert places.take("ipv4:10.0.1.1:1", None) == "768 calls of Watch are open: use Check instead"
    assert places.take("ipv4:10.0.1.1:1", KEY) == ""
    places.note_key("ipv4:10.0.1.2:1")
    assert places.take("ipv4:10.0.1.2:1", None) == ""
    assert fill(places, ["10.0.2.1"], KEY) == NUM_RESERVED - 2
    assert places.take("ipv4:10.0.1.1:2", KEY) == "1024 calls of Watch are open: use Check instead"


def test_a_freed_place_is_there_again(places: WatchPlaces) -> None:
    for _ in range(3):
        assert fill(places, ["10.0.0.1"]) == MAX_WATCHES_PER_ADDRESS
        for port in range(MAX_WATCHES_PER_ADDRESS):
            places.free(f"ipv4:10.0.0.1:{port}")
        assert places.num_taken == 0


def test_few_addresses_are_remembered(places: WatchPlaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_places, "MAX_WATCHES_PER_ADDRESS", 0)
    for number in range(MAX_KNOWN_ADDRESSES + 1):
        places.note_key(f"ipv4:10.{number >> 8}.{number & 255}.1:1")
    assert places.take("ipv4:10.0.0.1:1", None), "the oldest is forgotten"
    assert places.take("ipv4:10.0.1.1:1", None) == ""


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:5000", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5000", "10.0.0.1"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_addresses_of_peers(peer: str, address: str) -> None:
    assert address_of(peer) == address
