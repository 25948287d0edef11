"""Loads, evictions and waits for slots, with a real loader on a small model."""

import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.adapters import AdapterRef
from tandem.engine.adapters import manager as manager_module
from tandem.engine.adapters.base import AdapterError, AdapterLimits, AdapterState
from tandem.engine.adapters.manager import FIRST_USE_S, PATIENCE_S, AdapterManager
from tandem.engine.adapters.peft import read_info
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tests.fakes.adapters import write_adapter
from tests.fakes.clock import FakeClock
from tests.fakes.model_config import TINY_LLAMA

CPU = torch.device("cpu")
MAX_RANK = 4
NUM_SLOTS = 2
HOST_BYTES = 2**20
DEADLINE_S = 30.0


class Adapters:
    """A manager with a clock that stands still."""

    def __init__(self, root: Path, host_bytes: int = HOST_BYTES) -> None:
        (root / "config.json").write_text(json.dumps(TINY_LLAMA))
        self._root = root
        self._model = ModelConfig.from_dir(root)
        self.slots = AdapterSlots(build_model(self._model, torch.float32, CPU), NUM_SLOTS, MAX_RANK, CPU)
        self.clock = FakeClock()
        limits = AdapterLimits(NUM_SLOTS, MAX_RANK, host_bytes)
        self.manager = AdapterManager(self.slots, self._model, limits, self.clock)
        self.num_told = 0
        self.manager.on_loaded = self._on_loaded

    def _on_loaded(self) -> None:
        self.num_told += 1

    def add(self, seed: int) -> AdapterRef:
        info = read_info(write_adapter(self._root / str(seed), self._model, 4, seed=seed), self._model, MAX_RANK)
        self.manager.add(info)
        return info

    def loaded(self, info: AdapterRef) -> int:
        """Asks for the adapter until it is there."""
        deadline = time.monotonic() + DEADLINE_S
        while (slot := self.manager.acquire(info.content_hash)) is None:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        return slot

    def settled(self) -> dict[str, AdapterState]:
        deadline = time.monotonic() + DEADLINE_S
        while AdapterState.LOADING in (states := self.manager.states()).values():
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        return states

    def numbers(self, slot: int) -> torch.Tensor:
        weights = self.slots.held[0].linear.adapters
        assert weights is not None
        return weights.a[slot].clone()


@pytest.fixture
def adapters(tmp_path: Path) -> Iterator[Adapters]:
    made = Adapters(tmp_path)
    yield made
    made.manager.close()


def test_first_use_loads_and_later_uses_share_the_slot(adapters: Adapters) -> None:
    info = adapters.add(1)
    assert adapters.manager.states() == {info.content_hash: AdapterState.ON_DISK}
    assert adapters.manager.acquire(info.content_hash) is None
    slot = adapters.loaded(info)
    assert adapters.num_told == 1
    assert adapters.manager.acquire(info.content_hash) == slot
    assert adapters.manager.states() == {info.content_hash: AdapterState.ON_DEVICE}


def test_least_recently_used_adapter_without_uses_loses_its_slot(adapters: Adapters) -> None:
    first, second, third = map(adapters.add, (1, 2, 3))
    slots = {info.content_hash: adapters.loaded(info) for info in (first, second)}
    before = adapters.numbers(slots[first.content_hash])
    adapters.manager.release(second.content_hash)
    # The first is older, but used.
    assert adapters.loaded(third) == slots[second.content_hash]
    assert torch.equal(adapters.numbers(slots[first.content_hash]), before)
    assert adapters.manager.states()[second.content_hash] is AdapterState.IN_HOST
    adapters.manager.release(first.content_hash)
    assert adapters.loaded(second) == slots[first.content_hash]
    assert not torch.equal(adapters.numbers(slots[first.content_hash]), before)


def test_loaded_adapter_keeps_its_slot_until_the_waiting_request_asks(adapters: Adapters) -> None:
    pinned, awaited, other = map(adapters.add, (1, 2, 3))
    adapters.loaded(pinned)
    assert adapters.manager.acquire(awaited.content_hash) is None
    adapters.settled()
    assert adapters.manager.acquire(other.content_hash) is None
    assert adapters.settled()[awaited.content_hash] is AdapterState.ON_DEVICE
    # Its request never came.
    adapters.clock.advance(FIRST_USE_S)
    assert adapters.manager.acquire(other.content_hash) is None
    assert adapters.settled()[other.content_hash] is AdapterState.ON_DEVICE


def test_adapter_that_waits_long_gets_the_slot_of_one_in_constant_use(adapters: Adapters) -> None:
    first, second, third = map(adapters.add, (1, 2, 3))
    adapters.loaded(first)
    adapters.loaded(second)
    assert adapters.manager.acquire(third.content_hash) is None
    adapters.clock.advance(PATIENCE_S)
    assert adapters.manager.acquire(third.content_hash) is None
    # The first admits no new uses, the second does.
    assert adapters.manager.acquire(first.content_hash) is None
    assert adapters.manager.acquire(second.content_hash) is not None
    adapters.manager.release(first.content_hash)
    adapters.loaded(third)
    adapters.manager.release(third.content_hash)
    adapters.clock.advance(FIRST_USE_S)
    adapters.loaded(first)


def test_room_for_an_adapter_that_waits_no_more_is_given_back(adapters: Adapters) -> None:
    first, second, third = map(adapters.add, (1, 2, 3))
    adapters.loaded(first)
    adapters.loaded(second)
    for _ in range(2):
        assert adapters.manager.acquire(third.content_hash) is None
        adapters.clock.advance(PATIENCE_S)
    assert adapters.manager.acquire(first.content_hash) is None
    # Its request was cancelled.
    adapters.clock.advance(1.0)
    assert adapters.manager.acquire(first.content_hash) is not None
    # It begins to wait anew.
    adapters.clock.advance(PATIENCE_S)
    assert adapters.manager.acquire(third.content_hash) is None
    assert adapters.manager.acquire(first.content_hash) is not None
    adapters.clock.advance(PATIENCE_S)
    assert adapters.manager.acquire(third.content_hash) is None
    # Another slot is free first.
    adapters.manager.release(second.content_hash)
    adapters.loaded(third)
    assert adapters.manager.acquire(first.content_hash) is not None


def test_removed_adapter_stays_for_its_uses_and_takes_no_new_ones(adapters: Adapters) -> None:
    info = adapters.add(1)
    slot = adapters.loaded(info)
    numbers = adapters.numbers(slot)
    adapters.manager.remove(info.content_hash)
    assert adapters.manager.states() == {}
    with pytest.raises(AdapterError, match=info.content_hash):
        adapters.manager.acquire(info.content_hash)
    adapters.loaded(adapters.add(2))
    assert torch.equal(adapters.numbers(slot), numbers)
    # Added again meanwhile, it is the same one.
    adapters.manager.add(info)
    assert adapters.manager.acquire(info.content_hash) == slot
    for _ in range(2):
        adapters.manager.release(info.content_hash)
    adapters.manager.remove(info.content_hash)
    assert adapters.loaded(adapters.add(3)) == slot


def test_changed_files_are_refused_until_the_adapter_is_added_again(adapters: Adapters, tmp_path: Path) -> None:
    info = adapters.add(1)
    other = write_adapter(tmp_path / "other", ModelConfig.from_dir(tmp_path), 4, seed=9)
    shutil.copytree(other, info.path, dirs_exist_ok=True)
    adapters.manager.prefetch(info.content_hash)
    assert adapters.settled() == {info.content_hash: AdapterState.FAILED}
    with pytest.raises(AdapterError, match="has changed since it was added"):
        adapters.manager.acquire(info.content_hash)
    info = adapters.add(1)
    adapters.loaded(info)


def test_numbers_that_are_not_finite_are_refused(adapters: Adapters, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "broken", ModelConfig.from_dir(tmp_path), 4, size=math.inf)
    info = read_info(path, ModelConfig.from_dir(tmp_path), MAX_RANK)
    adapters.manager.add(info)
    adapters.manager.prefetch(info.content_hash)
    assert adapters.settled() == {info.content_hash: AdapterState.FAILED}
    with pytest.raises(AdapterError, match=r"module .*_proj of adapter .*broken has numbers that are not finite"):
        adapters.manager.acquire(info.content_hash)


def test_host_cache_is_bounded(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, host_bytes=20_000)
    infos = [adapters.add(seed) for seed in range(8)]
    for info in infos:
        adapters.manager.prefetch(info.content_hash)
        adapters.settled()
        assert 0 < adapters.manager.num_host_bytes <= 20_000
    states = adapters.manager.states()
    in_host = [info for info in infos if states[info.content_hash] is AdapterState.IN_HOST]
    assert in_host and in_host == infos[-len(in_host) :]
    # What was dropped loads from the disk.
    adapters.loaded(infos[0])
    adapters.manager.close()


def test_many_loads_and_unloads_hold_nothing(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "FIRST_USE_S", 0.0)
    infos = [adapters.add(seed) for seed in range(5)]
    for number in range(200):
        info = infos[number % 5]
        adapters.manager.add(info)
        adapters.loaded(info)
        adapters.manager.release(info.content_hash)
        adapters.manager.remove(info.content_hash)
    for info in infos:
        adapters.manager.remove(info.content_hash)
    assert adapters.manager.states() == {} and adapters.manager.num_host_bytes == 0
    # Both slots are free.
    for info in infos[:2]:
        adapters.manager.add(info)
        adapters.loaded(info)
