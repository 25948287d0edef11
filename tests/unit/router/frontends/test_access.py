"""API keys, their limits, and their cache namespaces."""

import itertools

import pytest

from tandem.router.errors import InvalidRequestError, OverloadedError, UnauthenticatedError
from tandem.router.frontends.access import Access, CacheNamespaces

TOKEN = "0123456789abcdef" * 2


def test_without_keys_everybody_is_the_same() -> None:
    access = Access((), 0)
    assert {access.identify(header) for header in (None, "", "Bearer a", "Basic b")} == {""}


def test_a_key_is_who_shows_it() -> None:
    access = Access(("one", "two"), 0)
    assert access.identify("Bearer one") == "one" and access.identify("bearer two") == "two"


@pytest.mark.parametrize(
    ("authorization", "message"),
    [
        (None, "an API key is needed"),
        ("Basic one", "an API key is needed"),
        ("Bearer ", "an API key is needed"),
        ("Bearer three", "the API key is wrong"),
    ],
)
def test_whoever_shows_none_is_told_what_to_do(authorization: str | None, message: str) -> None:
    with pytest.raises(UnauthenticatedError, match=message):
        Access(("one", "two"), 0).identify(authorization)


def test_a_key_has_its_own_limit() -> None:
    access = Access(("one", "two"), 2)
    with access.hold("one"), access.hold("one"):
        with pytest.raises(OverloadedError, match="2 requests of this key are in hand already"), access.hold("one"):
            pass
        with access.hold("two", 2):
            pass
    with pytest.raises(OverloadedError), access.hold("one", 3):
        pass
    with access.hold("one", 2):
        pass


def test_what_fails_in_hand_is_in_hand_no_more() -> None:
    access = Access((), 1)
    with pytest.raises(RuntimeError), access.hold(""):
        raise RuntimeError
    with access.hold(""):
        pass


def test_without_a_limit_there_is_none() -> None:
    access = Access((), 0)
    with access.hold("", 10_000), access.hold("", 10_000):
        pass


def test_a_key_has_its_own_largest_priority() -> None:
    access = Access(("urgent 100", "background -5", "plain"), 0, max_priority=1)
    assert access.identify("Bearer urgent") == "urgent"
    for key, limit in (("urgent", 100), ("background", -5), ("plain", 1), ("", 1)):
        access.check_priority(key, limit)
        access.check_priority(key, -(2**31))
        with pytest.raises(InvalidRequestError, match=f"at most {limit} for this client, not {limit + 1}") as raised:
            access.check_priority(key, limit + 1)
        assert raised.value.param == "priority"


def test_bytes_in_hand_are_counted_as_they_are_read_and_until_the_end() -> None:
    access = Access(("one",), 0, max_bytes=100)
    with access.hold_bytes("one") as first, access.hold_bytes("one") as second:
        first(60)
        second(10)
        with pytest.raises(OverloadedError, match="fill the memory set aside"):
            second(31)
        second(30)
    with access.hold_bytes("one") as hold:
        hold(100)


def test_of_several_keys_one_may_have_half_of_the_bytes() -> None:
    access = Access(("one", "two"), 0, max_bytes=100)
    with access.hold_bytes("one") as one, access.hold_bytes("two") as two:
        one(50)
        with pytest.raises(OverloadedError, match="50 bytes of requests of this key are in hand already"):
            one(1)
        two(50)
        with pytest.raises(OverloadedError, match="fill the memory set aside"):
            two(1)


def test_bytes_of_what_fails_are_in_hand_no_more() -> None:
    access = Access((), 0, max_bytes=100)
    with pytest.raises(RuntimeError), access.hold_bytes("") as hold:
        hold(100)
        raise RuntimeError
    with access.hold_bytes("") as hold:
        hold(100)


def test_no_name_that_a_client_gives_leads_into_another_key_s_namespace() -> None:
    namespaces = CacheNamespaces(TOKEN, share_between_keys=False)
    others = namespaces.of("second", "")
    names = ["", "a", "/", "second", others, others.rstrip("/"), f"{others}/", "../" + others]
    first, second = ({namespaces.of(key, name) for name in names} for key in ("first", "second"))
    assert not first & second
    # Each name of a key is a namespace of its own.
    assert len(first) == len(second) == len(names)


def test_routers_of_one_cluster_agree_and_workers_learn_no_key() -> None:
    one, other = CacheNamespaces(TOKEN, False), CacheNamespaces(TOKEN, False)
    assert one.of("sk-secret", "a") == other.of("sk-secret", "a")
    assert "sk-secret" not in one.of("sk-secret", "a")
    # A guessed key cannot be confirmed outside of the cluster.
    assert CacheNamespaces("another", False).of("sk-secret", "a") != one.of("sk-secret", "a")


def test_where_keys_share_or_there_are_none_clients_names_are_all() -> None:
    for shared, key in itertools.product((False, True), ("", "first", "second")):
        if shared or not key:
            assert CacheNamespaces(TOKEN, shared).of(key, "tenant") == "tenant"
