"""Identities of prompt prefixes."""

from tandem.prefix import prefix_identities


def test_identities_are_chained() -> None:
    a, b = prefix_identities([1, 2, 3, 4, 5], 2, ""), prefix_identities([9, 9, 3, 4], 2, "")
    assert len(a) == len(b) == 2
    assert a[1] != b[1]
    assert prefix_identities([1, 2], 2, "x") != a[:1]


def test_the_kind_of_sequence_does_not_matter() -> None:
    assert prefix_identities((1, 2, 3), 1, "") == prefix_identities([1, 2, 3], 1, "")
