"""The store's model notices faults: each is planted into the store, and the model must fail."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tandem.pagestore.server.key_index import KeyIndex
from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.sessions import Session, Sessions
from tandem.pagestore.server.slots import PINNED, READY, SlotTable
from tests.unit.pagestore.server.test_page_store_model import StoreMachine

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Plant] = {}


def fault(name: str) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        FAULTS[name] = plant
        return plant

    return add


@seed(6)
class SeededMachine(StoreMachine):
    """The first examples of this seed show every fault."""


def check_model(max_examples: int) -> None:
    run_state_machine_as_test(
        SeededMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=60,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )


@fault("pinned pages are evicted")
def _(patch: pytest.MonkeyPatch) -> None:
    def evictable_use(self: PageMemory, slot: int) -> int | None:
        is_leaf = self.states[slot] in (READY, PINNED) and not self._num_children[slot]
        return self._last_uses[slot] if is_leaf else None

    patch.setattr(PageMemory, "_evictable_use", evictable_use)


@fault("parents are evicted before their children")
def _(patch: pytest.MonkeyPatch) -> None:
    make_ready = PageMemory.make_ready

    def make_ready_and_evictable(self: PageMemory, slot: int) -> bool:
        is_ready = make_ready(self, slot)
        if is_ready:
            self._queue_for_eviction(slot)
        return is_ready

    patch.setattr(PageMemory, "make_ready", make_ready_and_evictable)
    patch.setattr(
        PageMemory, "_evictable_use", lambda self, slot: self._last_uses[slot] if self.states[slot] == READY else None
    )


@fault("a slot's generations repeat")
def _(patch: pytest.MonkeyPatch) -> None:
    take = SlotTable.take

    def take_again(self: SlotTable, state: int, key: bytes, parent: bytes, identity: bytes) -> int:
        slot = take(self, state, key, parent, identity)
        self.generations[slot] = 1
        return slot

    patch.setattr(SlotTable, "take", take_again)


@fault("pages are found while they are written")
def _(patch: pytest.MonkeyPatch) -> None:
    def pin_run(self: PageMemory, keys: Iterable[bytes]) -> list[int]:
        slots = []
        for key in keys:
            slot = self.slot(key)
            if slot is None:
                break
            self.pin(slot)
            slots.append(slot)
        return slots

    patch.setattr(PageMemory, "pin_run", pin_run)


@fault("slots of a closed session are free before its process is gone")
def _(patch: pytest.MonkeyPatch) -> None:
    def take_settled(self: Sessions) -> list[Session]:
        settled = list(self._closed)
        self._closed.clear()
        return settled

    patch.setattr(Sessions, "take_settled", take_settled)


@fault("slots are granted before the last life's users are gone")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageStore, "_is_quiet", property(lambda self: True))


@fault("purged pages are found")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyIndex, "clear", lambda self: None)


@pytest.mark.parametrize("name", FAULTS)
def test_the_model_finds_a_planted_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    # A key that is not where it should be may stop the store itself.
    with pytest.raises((AssertionError, KeyError)):
        check_model(max_examples=200)


def test_the_same_examples_pass_without_a_fault() -> None:
    check_model(max_examples=20)
