import pytest

from tandem.pagestore.server.key_index import KeyIndex
from tests.fakes.store_client import key


def test_keys_lead_to_slots_until_they_are_removed() -> None:
    index = KeyIndex()
    for slot in range(1000):
        index.add(key(str(slot)), slot)
    index.remove(key("7"))
    assert index.get(key("7")) is None and index.get(key("8")) == 8 and len(index) == 999
    assert sorted(slot for _, slot in index.items()) == [slot for slot in range(1000) if slot != 7]
    with pytest.raises(KeyError):
        index.remove(key("7"))


def test_cleared_keys_are_gone_at_once_and_freed_bit_by_bit() -> None:
    index = KeyIndex()
    index.free_some()
    index.add(key("a"), 1)
    index.clear()
    assert len(index) == 0 and index.get(key("a")) is None
    index.add(key("a"), 2)
    for _ in range(300):
        index.free_some()
    assert index.get(key("a")) == 2


def test_clearing_again_and_again_keeps_nothing() -> None:
    index = KeyIndex()
    for _ in range(1000):
        index.add(key("a"), 1)
        index.clear()
        index.free_some()
    assert len(index._dropped) <= 1
