"""What routers are told of the pages of a cache or a tier."""

from hypothesis import given
from hypothesis import strategies as st

from tandem import page_changes
from tandem.page_changes import PageChangeLog
from tests.fakes.store_client import identity


@given(st.lists(st.sampled_from([*"abcdef", "purge", "take"]), max_size=60), st.integers(1, 4))
def test_what_is_told_adds_up_to_what_is_stored(acts: list[str], max_changes: int) -> None:
    log, stored, told = PageChangeLog(), dict[bytes, None](), set[bytes]()

    def take() -> None:
        changes = log.take()
        assert not told & set(changes.stored) and told >= set(changes.removed)
        assert len(set(changes.stored)) == len(changes.stored)
        told.update(changes.stored)
        told.difference_update(changes.removed)

    was, page_changes.MAX_CHANGES = page_changes.MAX_CHANGES, max_changes
    try:
        for act in acts:
            if act == "take":
                take()
            elif act == "purge":
                log.remove_all(iter(list(stored)))
                stored.clear()
            elif identity(act) in stored:
                del stored[identity(act)]
                log.remove(identity(act))
            else:
                stored[identity(act)] = None
                log.store(identity(act))
        for _ in range(100):
            take()
        assert told == set(stored)
    finally:
        page_changes.MAX_CHANGES = was


def test_a_large_purge_is_told_in_parts_and_before_later_changes() -> None:
    log, identities = PageChangeLog(), [number.to_bytes(8, "little") for number in range(page_changes.MAX_CHANGES + 1)]
    for each in identities:
        log.store(each)
    assert [len(log.take().stored) for _ in range(2)] == [page_changes.MAX_CHANGES, 1]
    log.remove_all(iter(identities))
    log.store(identities[-1])
    first, second, third = log.take(), log.take(), log.take()
    assert (first.stored, len(first.removed)) == ((), page_changes.MAX_CHANGES)
    assert second == third == ((), ()), "removed and stored again"
