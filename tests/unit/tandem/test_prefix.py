"""Identities of prompt prefixes."""

import os
import subprocess
import sys

import pytest

from tandem.prefix import (
    adapted_namespace,
    namespace_identity,
    page_identity,
    prefix_identities,
    split_namespace,
    unpack_identities,
)


def test_identities_are_chained() -> None:
    a, b = prefix_identities([1, 2, 3, 4, 5], 2, ""), prefix_identities([9, 9, 3, 4], 2, "")
    assert len(a) == len(b) == 2
    assert a[1] != b[1]
    assert prefix_identities([1, 2], 2, "x") != a[:1]


def test_the_kind_of_sequence_does_not_matter() -> None:
    assert prefix_identities((1, 2, 3), 1, "") == prefix_identities([1, 2, 3], 1, "")


def test_prefix_without_a_full_page_has_no_identity() -> None:
    assert prefix_identities([1, 2, 3], 4, "") == [] == prefix_identities([], 4, "x")


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_identities_are_the_same_in_every_process(seed: str) -> None:
    program = "from tandem.prefix import prefix_identities; print(prefix_identities(range(70000, 70032), 16, 'tenant'))"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(prefix_identities(range(70000, 70032), 16, "tenant"))
    # Stable between versions.
    assert prefix_identities([1, 2, 3], 1, "tenant") == prefix_identities([1, 2, 3], 1, "tenant")


def test_pages_one_by_one_give_the_same() -> None:
    first = page_identity(namespace_identity("tenant"), (5, 6))
    packed = first + page_identity(first, (7, 8))
    assert list(unpack_identities(packed)) == prefix_identities([5, 6, 7, 8, 9], 2, "tenant")
    with pytest.raises(ValueError, match="bytes"):
        unpack_identities(packed[:-1])


def test_known_prefix_is_not_read_again() -> None:
    whole = prefix_identities(range(10), 2, "tenant")
    for num_known in range(6):
        known = whole[:num_known]
        unread = [0] * (2 * num_known) + list(range(2 * num_known, 10))
        assert prefix_identities(unread, 2, "tenant", known) == whole


def test_the_namespace_of_an_adapter_has_two_parts() -> None:
    for namespace in ("", "tenant", "digest/tenant"):
        assert split_namespace(adapted_namespace(namespace, "ab12")) == (namespace, "ab12")
        assert split_namespace(adapted_namespace(namespace, "")) == (namespace, "")
