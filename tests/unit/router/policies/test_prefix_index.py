"""The router's own idea of which worker has cached which prefix."""

from collections.abc import Sequence

from router.policies.prefix_index import PrefixIndex
from tandem.prefix import prefix_identities


def known(index: PrefixIndex, incarnation: str, identities: Sequence[int]) -> int:
    return index.known_pages(identities)(incarnation)


def test_the_index_knows_leading_pages_and_forgets_the_oldest() -> None:
    index = PrefixIndex(max_entries=10)
    long, other = prefix_identities(range(32), 4, ""), prefix_identities(range(100, 116), 4, "")
    index.record_sent("w", long)
    assert known(index, "w", long) == 8
    assert known(index, "w", [*long[:3], *other]) == 3
    assert known(index, "v", long) == 0
    index.record_sent("w", other)
    assert len(index) == 10
    # What is forgotten of a prefix is its end.
    assert known(index, "w", long) == 6 and known(index, "w", other) == 4


def test_a_worker_that_is_started_again_has_nothing_cached() -> None:
    index = PrefixIndex()
    identities = prefix_identities(range(8), 4, "")
    index.record_sent("w-first-life", identities)
    assert known(index, "w-second-life", identities) == 0


def test_many_workers_are_asked_about_one_prompt_in_any_order() -> None:
    index = PrefixIndex()
    identities = prefix_identities(range(64), 4, "")
    num_known = {f"w{number}": number % 17 for number in range(40)}
    for incarnation, num_pages in num_known.items():
        index.record_sent(incarnation, identities[:num_pages])
    for step in (1, 7, 13):
        count = index.known_pages(identities)
        order = [f"w{number * step % 40}" for number in range(40)]
        assert [count(incarnation) for incarnation in order] == [num_known[incarnation] for incarnation in order]


def test_nothing_is_left_of_workers_whose_pages_are_forgotten() -> None:
    index = PrefixIndex(max_entries=10)
    for number in range(100):
        index.record_sent(f"life {number}", prefix_identities(range(number, number + 8), 4, ""))
    assert len(index) == 10 and len(index._known) == 5
