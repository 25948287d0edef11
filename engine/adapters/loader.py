"""Thread that reads adapters and copies them to the device."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.adapters import AdapterRef
from tandem.engine.adapters.base import AdapterError
from tandem.engine.adapters.host import HostAdapter, cut_adapter
from tandem.engine.adapters.peft import read_adapter
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.models.config import ModelConfig

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
# For the followers' loads, behind the leader's own.
FOLLOWERS_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 1e-3


class Load(NamedTuple):
    """
    Attributes:
        number: from 1 without gaps.
        slot: None: only into host memory.
        host: None: read it from the disk.
        after: forward passes that may use the slot's earlier adapter end before this event; None: on a CPU.
        order: of the followers; 0: there are none.
    """

    number: int
    info: AdapterRef
    slot: int | None
    host: HostAdapter | None
    after: "torch.cuda.Event | None"
    order: int = 0


class Loaded(NamedTuple):
    """
    Attributes:
        host: None if it failed.
        error: one line; empty if it did not fail.
    """

    load: Load
    host: HostAdapter | None
    error: str


class AdapterLoader:
    """Does one load after another, in order. The thread ends with the process."""

    def __init__(
        self,
        slots: AdapterSlots,
        model: ModelConfig,
        on_loaded: Callable[[], None],
        has_failed: Callable[[int], bool | None] = lambda order: False,
    ) -> None:
        """
        Args:
            on_loaded: called by the thread after each load.
            has_failed: whether the followers' load of an order has failed; None: some still load.
        """
        self._slots = slots
        self._model = model
        self._on_loaded = on_loaded
        self._has_failed = has_failed
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
        self._thread.start()

    def submit(self, load: Load) -> None:
        self._loads.put(load)

    def take(self) -> list[Loaded]:
        """Returns the loads that have ended since the last call, oldest first."""
        loaded = []
        while not self._loaded.empty():
            loaded.append(self._loaded.get())
        return loaded

    def close(self) -> None:
        """Waits for the load that is being done."""
        self._loads.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        stream = self._slots.new_stream()
        while (load := self._loads.get()) is not None:
            host, error = load.host, ""
            try:
                if host is None:
                    host = self._read(load.info)
                if load.slot is not None:
                    self._slots.write_after(load.slot, host, stream, load.after)
                    self._await_followers(load)
            except AdapterError as failure:
                logger.warning("%s", failure)
                host, error = None, str(failure)
            except Exception as failure:
                # A request waits for an answer; the device's own errors end the next forward pass too.
                logger.exception("loading adapter %s failed", load.info.path)
                host, error = None, f"adapter {load.info.path} could not be loaded: {type(failure).__name__}"
            self._loaded.put(Loaded(load, host, error))
            self._on_loaded()

    def _await_followers(self, load: Load) -> None:
        deadline = time.monotonic() + FOLLOWERS_TIMEOUT_S
        while (has_failed := self._has_failed(load.order)) is None:
            if time.monotonic() > deadline:
                raise AdapterError(
                    f"another rank has not loaded adapter {load.info.path} for {FOLLOWERS_TIMEOUT_S:g} s"
                )
            time.sleep(LOOK_INTERVAL_S)
        if has_failed:
            raise AdapterError(f"adapter {load.info.path} could not be loaded on another rank; its log says why")

    def _read(self, info: AdapterRef) -> HostAdapter:
        adapter = read_adapter(Path(info.path), self._model, self._slots.max_rank)
        if adapter.info.content_hash != info.content_hash:
            raise AdapterError(f"the adapter in {info.path} has changed since it was added: load it again")
        return cut_adapter(adapter, self._slots.held, self._slots.dtype)
