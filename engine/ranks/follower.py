"""The loop of a follower: launches the leader's forward passes on its own device."""

import time
from collections import deque
from typing import TYPE_CHECKING

from tandem.engine.adapters.follower import LoadOrder
from tandem.engine.kvcache.base import Completion
from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.record import ForwardRecord
from tandem.engine.ranks.replay import Replay
from tandem.engine.ranks.ring import Ring

if TYPE_CHECKING:
    from tandem.engine.engine import Engine

# Pauses between looks for a record, in seconds, from the time since the last record on. A pause of 0 only lets other
# threads run. On CPUs the ranks compute on the cores that a loop without pauses would take.
CPU_PAUSES = ((0.0, 100e-6), (20e-3, 1e-3))
GPU_PAUSES = ((0.0, 0.0), (50e-6, 50e-6), (2e-3, 1e-3))
# While forward passes run.
BUSY_PAUSE_S = 50e-6


class FollowerLoop:
    """Posts each forward pass that its device has completed, and a beat at every look."""

    def __init__(self, engine: "Engine", ring: Ring, progress: Progress) -> None:
        collectives = engine.model.collectives
        assert collectives is not None
        self._engine = engine
        self._collectives = collectives
        self._ranks = collectives.ranks
        self._reader = ring.reader(self._ranks.rank)
        self._progress = progress
        self._replay = Replay()
        self._running: deque[tuple[int, Completion]] = deque()
        self._num_launched = 0
        self._pauses = CPU_PAUSES if engine.device.type == "cpu" else GPU_PAUSES

    def run(self) -> None:
        """Follows until the leader stops the followers, and all forward passes are done.

        Raises:
            ConnectionError: another rank has ended.
            RuntimeError: the ranks disagree, or an operation between them failed.
        """
        idle_since = time.monotonic()
        while True:
            # Before the look: the leader stops after its last record.
            is_stopping = self._progress.is_stopping
            message = self._reader.take()
            self._tend()
            if message is not None:
                if (order := LoadOrder.decode(message)) is not None:
                    self._load(order)
                else:
                    self._launch(ForwardRecord.decode(message))
                idle_since = time.monotonic()
            elif is_stopping and not self._running:
                self._collectives.close()
                return
            else:
                self._pause(time.monotonic() - idle_since)

    def _launch(self, record: ForwardRecord) -> None:
        if record.number != self._num_launched + 1:
            raise RuntimeError(f"forward pass {record.number} came after {self._num_launched}")
        completion = self._engine.follow(self._replay.batch(record), self._tend)
        self._num_launched = record.number
        self._running.append((record.number, completion))
        self._tend()
        self._collectives.check()

    def _load(self, order: LoadOrder) -> None:
        adapters = self._engine.follower_adapters
        assert adapters is not None
        adapters.load(order)

    def _tend(self) -> None:
        self._progress.beat(self._ranks)
        if self._engine.follower_adapters is not None:
            for order, has_failed in self._engine.follower_adapters.ended():
                self._progress.end_load(self._ranks, order, has_failed=has_failed)
        number = 0
        while self._running and self._running[0][1].done():
            number, _ = self._running.popleft()
        # After the look at the device: an aborted forward pass ends without results.
        if self._progress.is_aborted:
            raise ConnectionError("another rank of this worker has ended")
        if number:
            self._progress.complete_forward(self._ranks, number)

    def _pause(self, idle_s: float) -> None:
        pause_s = next(pause_s for after_s, pause_s in reversed(self._pauses) if idle_s >= after_s)
        time.sleep(min(pause_s, BUSY_PAUSE_S) if self._running else pause_s)
