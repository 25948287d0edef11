import pytest

from tandem.pagestore.server.namespaces import Namespaces
from tandem.prefix import owner_of


@pytest.mark.parametrize(
    ("namespace", "owner"), [("", ""), ("0f3a/", "0f3a"), ("0f3a/chat/2", "0f3a"), ("tenant", "tenant")]
)
def test_an_api_key_owns_all_namespaces_of_its_requests(namespace: str, owner: str) -> None:
    assert owner_of(namespace) == owner


def test_slots_are_counted_by_namespace() -> None:
    namespaces = Namespaces(4, 0.5)
    for slot, name in enumerate("xxy"):
        namespaces.add_slot(slot, name)
    assert [namespaces.is_full(name) for name in "xyz"] == [True, False, False]
    namespaces.remove_slot(0)
    namespaces.remove_slot(2)
    assert namespaces.get("y") is None and namespaces.of(1) is namespaces.get("x")
    assert not namespaces.is_full("x") and namespaces.check_integrity([1]) == ""
    assert namespaces.check_integrity([]) == "slots of namespaces are miscounted"


def test_names_that_come_and_go_take_no_memory() -> None:
    namespaces = Namespaces(2, 1.0)
    for number in range(100):
        namespaces.add_slot(number % 2, str(number))
        assert namespaces.of(number % 2).name == str(number) and namespaces.of(number % 2).number < 2
        namespaces.remove_slot(number % 2)


def test_a_purge_keeps_the_slots_in_use() -> None:
    namespaces = Namespaces(4, 0.5)
    for slot, name in enumerate("xxyz"):
        namespaces.add_slot(slot, name)
        namespaces.of(slot).queue.add(slot, 1)
    namespaces.purge([1])
    assert not namespaces.is_full("x") and namespaces.get("z") is None
    assert not namespaces.is_queued(1) and namespaces.check_integrity([1]) == ""
