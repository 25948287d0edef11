"""Index, eviction and quotas, and their costs."""

from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.slots import WRITING
from tests.fakes.store_client import identity, key, stored_page


def add(memory: PageMemory, name: str, parent: str = "", namespace: str = "") -> int | None:
    memory.next_tick()
    slot = memory.allocate(stored_page(name, parent, namespace), WRITING)
    if slot is not None:
        memory.make_ready(slot)
    return slot


def test_pages_are_removed_once_nobody_needs_them() -> None:
    memory = PageMemory(2)
    a, b = add(memory, "a"), add(memory, "b")
    assert a is not None and b is not None
    memory.pin(a)
    memory.use(b)
    assert add(memory, "c") is not None and memory.slot(key("b")) is None
    memory.purge()
    assert memory.slot(key("a")) is None and (memory.num_free, memory.num_pinned) == (1, 1)
    memory.unpin([a])
    assert memory.num_free == 2 and memory.check_integrity() == ""


def test_changes_cancel_out() -> None:
    memory = PageMemory(1)
    add(memory, "a")
    add(memory, "b")
    assert memory.changes.take() == ((identity("b"),), ())
    memory.purge()
    add(memory, "b")
    assert memory.changes.take() == ((), ())


def test_a_parent_is_evicted_after_its_last_child() -> None:
    memory = PageMemory(3)
    add(memory, "a")
    add(memory, "ab", "a")
    add(memory, "ac", "a")
    for name, gone in (("x", "ab"), ("y", "ac"), ("z", "a")):
        add(memory, name)
        assert memory.slot(key(gone)) is None
    assert memory.check_integrity() == ""


def test_a_slot_that_changes_its_namespace_is_evicted_for_the_right_one() -> None:
    memory = PageMemory(4, max_namespace_share=0.5)
    add(memory, "a", namespace="x")
    add(memory, "b", namespace="y")
    add(memory, "c", namespace="z")
    add(memory, "d", namespace="z")
    # Takes the slot of a, which the queue of x still names.
    add(memory, "e", namespace="y")
    add(memory, "f", namespace="x")
    add(memory, "g", namespace="x")
    assert add(memory, "h", namespace="x") is not None
    assert memory.slot(key("f")) is None and memory.slot(key("e")) is not None
    assert memory.check_integrity() == ""


def test_a_parent_given_up_leaves_its_child_to_eviction() -> None:
    memory = PageMemory(2)
    memory.next_tick()
    parent = memory.allocate(stored_page("a"), WRITING)
    child = memory.allocate(stored_page("ab", "a"), WRITING)
    assert parent is not None and child is not None
    memory.make_ready(child)
    memory.discard(parent)
    assert memory.slot(key("ab")) == child
    again = add(memory, "a")
    assert again is not None and memory.check_integrity() == ""
    add(memory, "x")
    assert memory.slot(key("ab")) is None and memory.slot(key("a")) == again
