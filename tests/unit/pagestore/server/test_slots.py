import pytest

from tandem.pagestore.server.slots import FREE, PINNED, READING, READY, UNLISTED, WRITING, SlotTable
from tests.fakes.store_client import identity, key


def take(slots: SlotTable, name: str, state: int = WRITING, parent: str = "") -> int:
    return slots.take(state, key(name), key(parent) if parent else b"", identity(name))


def test_a_slot_has_another_generation_each_time() -> None:
    slots = SlotTable(2)
    taken = []
    for _ in range(3):
        pages = [take(slots, name) for name in "ab"]
        taken += [(slot, slots.generations[slot]) for slot in pages]
        assert slots.num_free == 0 and slots.check_integrity() == ""
        for slot in pages:
            slots.give_back(slot)
    assert len(set(taken)) == 6 and {slot for slot, _ in taken} == {0, 1}
    assert slots.num_free == 2 and slots.check_integrity() == "" and list(slots.in_use()) == []


def test_a_slot_knows_its_page() -> None:
    slots = SlotTable(2)
    first, second = take(slots, "a"), take(slots, "ab", parent="a")
    assert (slots.keys(first), slots.identity(first)) == ((key("a"), b""), identity("a"))
    assert (slots.keys(second), slots.identity(second)) == ((key("ab"), key("a")), identity("ab"))


def test_taking_more_than_there_are_is_an_error() -> None:
    slots = SlotTable(1)
    take(slots, "a")
    with pytest.raises(IndexError):
        take(slots, "b")


def test_a_slot_given_back_twice_is_noticed() -> None:
    slots = SlotTable(1)
    slot = take(slots, "a")
    slots.give_back(slot)
    slots.give_back(slot)
    assert slots.check_integrity() == "2 slots are free, but only 1 different ones"


def test_a_purge_frees_unused_slots_and_marks_the_others() -> None:
    slots = SlotTable(7)
    for name, state in zip("abcdef", (READY, WRITING, READING, PINNED, READY, WRITING), strict=True):
        take(slots, name, state)
    slots.num_pins[3] = 1
    slots.give_back(5)
    assert list(slots.purge()) == [identity("a"), identity("d"), identity("e")]
    assert list(slots.states[1:4]) == [WRITING | UNLISTED, READING | UNLISTED, PINNED | UNLISTED]
    assert list(slots.in_use()) == [1, 2, 3] and slots.num_free == 4 and slots.check_integrity() == ""
    slots.give_back(1)
    assert {take(slots, name) for name in "ghijk"} == {0, 1, 4, 5, 6} and slots.check_integrity() == ""
    assert list(slots.purge()) == []
    assert FREE not in slots.states
