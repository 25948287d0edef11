from hypothesis import given
from hypothesis import strategies as st

from tandem.pagestore.server.eviction_queue import EvictionQueue


def test_an_entry_moves_with_later_uses() -> None:
    queue = EvictionQueue(bytearray(3))
    uses = {0: 1, 1: 2, 2: 3}
    for slot, use in uses.items():
        queue.add(slot, use)
    uses[0] = 9
    assert [queue.pop(uses.get) for _ in range(4)] == [1, 2, 0, None]


@given(
    st.lists(st.tuples(st.sampled_from(["add", "use", "hold", "pop"]), st.integers(0, 4)), max_size=60),
    st.sampled_from([1, 100, 1000]),
)
def test_the_least_recent_evictable_slot_comes_first(acts: list[tuple[str, int]], step: int) -> None:
    is_queued = bytearray(5)
    queue, uses, free = EvictionQueue(is_queued), dict.fromkeys(range(5), 0), set[int]()

    def evictable_use(slot: int) -> int | None:
        return uses[slot] if slot in free else None

    for tick, (act, slot) in enumerate(acts, 1):
        if act == "add":
            free.add(slot)
            queue.add(slot, uses[slot])
        elif act == "use":
            uses[slot] = tick * step
        elif act == "hold":
            free.discard(slot)
        else:
            expected = min(free, key=lambda slot: (uses[slot], slot), default=None)
            assert queue.pop(evictable_use) == expected
            free.discard(-1 if expected is None else expected)
        assert sorted(queue.slots()) == [slot for slot in range(5) if is_queued[slot]]
        assert free <= set(queue.slots())
