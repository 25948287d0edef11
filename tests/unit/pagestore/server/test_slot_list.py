import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.pagestore.server.slot_list import SlotList


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "clear"]), st.integers(0, 4)), max_size=40))
def test_slots_keep_the_order_of_their_last_addition(acts: list[tuple[str, int]]) -> None:
    slots, expected = SlotList(5), list[int]()
    for act, slot in acts:
        if act == "clear":
            slots.clear()
            expected.clear()
        elif act == "add":
            slots.add(slot)
        elif slot in expected:
            slots.remove(slot)
        if slot in expected:
            expected.remove(slot)
        if act == "add":
            expected.append(slot)
        assert list(slots) == expected and len(slots) == len(expected)
        assert not expected or slots.first == expected[0]


def test_an_empty_list_has_no_first_slot() -> None:
    with pytest.raises(IndexError):
        _ = SlotList(0).first
