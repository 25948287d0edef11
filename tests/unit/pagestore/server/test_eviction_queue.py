from hypothesis import given
from hypothesis import strategies as st

from tandem.pagestore.server.eviction_queue import EvictionQueue


def test_an_entry_moves_with_later_uses() -> None:
    queue = EvictionQueue()
    uses = {0: 1, 1: 2, 2: 3}
    for slot, use in uses.items():
        queue.add(slot, use)
    uses[0] = 9
    assert [queue.pop(uses.get) for _ in range(4)] == [1, 2, 0, None]


@given(st.lists(st.tuples(st.sampled_from(["add", "use", "hold", "pop"]), st.integers(0, 4)), max_size=60))
def test_the_least_recent_evictable_slot_comes_first(acts: list[tuple[str, int]]) -> None:
    queue, uses, free = EvictionQueue(), dict.fromkeys(range(5), 0), set[int]()

    def evictable_use(slot: int) -> int | None:
        return uses[slot] if slot in free else None

    for tick, (act, slot) in enumerate(acts, 1):
        if act == "add":
            free.add(slot)
            queue.add(slot, uses[slot])
        elif act == "use":
            uses[slot] = tick
        elif act == "hold":
            free.discard(slot)
        else:
            expected = min(free, key=lambda slot: (uses[slot], slot), default=None)
            assert queue.pop(evictable_use) == expected
            free.discard(-1 if expected is None else expected)
        assert len(queue) <= 5 and all(slot in queue for slot in free)
