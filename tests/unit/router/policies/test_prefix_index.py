"""The router's own idea of which worker has cached which prefix."""

from router.policies.prefix_index import PrefixIndex
from tandem.prefix import prefix_identities


def test_the_index_knows_leading_pages_and_forgets_the_oldest() -> None:
    index = PrefixIndex(max_entries=10)
    long, other = prefix_identities(range(32), 4, ""), prefix_identities(range(100, 116), 4, "")
    index.record_sent("w", long)
    assert index.count_known_pages("w", long) == 8
    assert index.count_known_pages("w", [*long[:3], *other]) == 3
    assert index.count_known_pages("v", long) == 0
    index.record_sent("w", other)
    assert len(index) == 10
    # What is forgotten of a prefix is its end.
    assert index.count_known_pages("w", long) == 6 and index.count_known_pages("w", other) == 4


def test_a_worker_that_is_started_again_has_nothing_cached() -> None:
    index = PrefixIndex()
    identities = prefix_identities(range(8), 4, "")
    index.record_sent("w-first-life", identities)
    assert index.count_known_pages("w-second-life", identities) == 0
