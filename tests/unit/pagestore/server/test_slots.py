import pytest

from tandem.pagestore.server.slots import PageState, SlotTable
from tests.fakes.store_client import stored_page


def test_a_slot_has_another_generation_each_time() -> None:
    slots = SlotTable(2)
    taken = []
    for _ in range(3):
        pages = [slots.take(stored_page(name), PageState.WRITING, 0) for name in "ab"]
        taken += [(page.slot, page.generation) for page in pages]
        assert slots.num_free == 0 and slots.check_integrity() == ""
        for page in pages:
            slots.give_back(page)
    assert len(set(taken)) == 6 and {slot for slot, _ in taken} == {0, 1}
    assert slots.num_free == 2 and slots.check_integrity() == "" and list(slots) == []


def test_taking_more_than_there_are_is_an_error() -> None:
    slots = SlotTable(1)
    slots.take(stored_page("a"), PageState.WRITING, 0)
    with pytest.raises(IndexError):
        slots.take(stored_page("b"), PageState.WRITING, 0)


def test_a_slot_given_back_twice_is_noticed() -> None:
    slots = SlotTable(1)
    page = slots.take(stored_page("a"), PageState.WRITING, 0)
    slots.give_back(page)
    slots.give_back(page)
    assert slots.check_integrity() == "2 slots are free, but only 1 different ones"
