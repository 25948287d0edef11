"""What a client of one API key can come upon in the caches."""

import itertools

from tandem.router.frontends.cache_namespaces import CacheNamespaces

TOKEN = "0123456789abcdef" * 2


def test_no_name_that_a_client_gives_leads_into_another_key_s_namespace() -> None:
    namespaces = CacheNamespaces(TOKEN, share_between_keys=False)
    others = namespaces.of("second", "")
    names = ["", "a", "/", "second", others, others.rstrip("/"), f"{others}/", "../" + others]
    first, second = ({namespaces.of(key, name) for name in names} for key in ("first", "second"))
    assert not first & second
    # Within a key's own, each name is another.
    assert len(first) == len(second) == len(names)


def test_routers_of_one_cluster_agree_and_workers_learn_no_key() -> None:
    one, other = CacheNamespaces(TOKEN, False), CacheNamespaces(TOKEN, False)
    assert one.of("sk-secret", "a") == other.of("sk-secret", "a")
    assert "sk-secret" not in one.of("sk-secret", "a")
    # Nor can anybody who guesses a key find it confirmed outside of the cluster.
    assert CacheNamespaces("another", False).of("sk-secret", "a") != one.of("sk-secret", "a")


def test_where_keys_share_or_there_are_none_clients_names_are_all() -> None:
    for shared, key in itertools.product((False, True), ("", "first", "second")):
        if shared or not key:
            assert CacheNamespaces(TOKEN, shared).of(key, "tenant") == "tenant"
