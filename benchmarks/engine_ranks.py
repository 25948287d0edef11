"""An engine of several ranks, without a worker around it."""

import os
import sys
from collections.abc import Callable
from typing import cast

from benchmarks.engine_loop import INCARNATION, build_alone
from tandem.engine.base import EngineBase
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.ranks.follower import FollowerLoop
from tandem.engine.ranks.recorder import ForwardRecorder
from tandem.worker.base import WorkerRole
from tandem.worker.config import WorkerConfig
from tandem.worker.ranks.processes import RankProcesses
from tandem.worker.ranks.seat import Seat
from tandem.worker.ranks.serving import avoid_pauses, build_part, use_device

STOP_TIMEOUT_S = 30.0


class RankedEngines:
    """Builds an engine together with its followers, which end with this object. A context manager."""

    def __init__(self) -> None:
        self._processes: RankProcesses | None = None
        self._engine: EngineBase | None = None

    def __enter__(self) -> "RankedEngines":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._processes is not None:
            self._processes.stop(STOP_TIMEOUT_S)

    def build(self, config: EngineConfig, on_progress: Callable[[str], None]) -> EngineBase:
        """Call it once. Raises ValueError if the model cannot be served by so many ranks."""
        if config.degree == 1:
            return build_alone(config, on_progress)
        worker = WorkerConfig("both-0", "both", config, config.max_batch_size)
        self._processes = RankProcesses(worker, cast(WorkerRole, None), INCARNATION, follow, _end)
        memory = self._processes.memory
        use_device(config.device, self._processes.group.ranks)
        recorder = ForwardRecorder(memory.ring, memory.progress, config.page_size)
        self._engine = build_engine(config, INCARNATION, on_progress, self._processes.group, recorder)
        return self._engine


def follow(seat: Seat) -> None:
    engine = build_part(seat, lambda doing: None)
    avoid_pauses()
    FollowerLoop(engine, seat.memory.ring, seat.memory.progress).run()


def _end(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    # The leader's thread may wait for the dead rank.
    os._exit(1)
