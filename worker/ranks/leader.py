"""The leader's side of a worker's ranks."""

import logging
import os
import threading
from collections.abc import Callable, Sequence

from tandem import exit_codes
from tandem.engine.base import EngineBase
from tandem.engine.build import build_engine
from tandem.engine.ranks.recorder import ForwardRecorder
from tandem.messages import LinkRank
from tandem.worker.base import FollowerLinks, MessagePipe, StoreConnection, WorkerRole
from tandem.worker.config import WorkerConfig
from tandem.worker.ranks.processes import RankProcesses
from tandem.worker.ranks.serving import serve_follower
from tandem.worker.ranks.standstill import GroupPulse, GroupSteps

logger = logging.getLogger(__name__)

# Time for a start that lost a rank to report the reason, in seconds.
FAILURE_GRACE_S = 10.0


class Leader:
    """Builds the engine together with the followers, and ends the process if one of them ends.

    Attributes:
        followers: empty before `build`, and with one rank.
        copy_pipes: to the copies of each follower between its pool and the page store.
    """

    def __init__(
        self, config: WorkerConfig, role: WorkerRole, incarnation: str, store: StoreConnection | None = None
    ) -> None:
        self.followers: tuple[FollowerLinks, ...] = ()
        self.copy_pipes: Sequence[MessagePipe] = ()
        self._store = store
        self._config = config
        self._role = role
        self._incarnation = incarnation
        self._processes: RankProcesses | None = None
        self._steps: GroupSteps | None = None
        self._pulse: GroupPulse | None = None
        self._has_failed = threading.Event()

    def build(self, on_progress: Callable[[str], None], num_steps: Callable[[], int]) -> EngineBase:
        """Returns the engine of this rank.

        Args:
            num_steps: returns the worker's steps.

        Raises:
            ValueError: the model cannot be served as configured, here or on another rank.
        """
        engine_config = self._config.engine
        if engine_config.degree == 1:
            return build_engine(engine_config, self._incarnation, on_progress)
        processes = self._processes = RankProcesses(
            self._config, self._role, self._incarnation, serve_follower, self._on_death, self._store
        )
        memory = processes.memory
        recorder = ForwardRecorder(memory.ring, memory.progress, engine_config.page_size)
        try:
            engine = build_engine(engine_config, self._incarnation, on_progress, processes.group, recorder)
            ranks = processes.group.gathered(LinkRank(os.getpid(), engine.pool.gpu, engine.pool.layout.heads))
        except Exception as error:
            self._has_failed.set()
            # The others fail because of the first.
            cause = None if isinstance(error, ValueError) else processes.find_failure()
            self.stop(0.0)
            if cause is None:
                raise
            raise cause from error
        self.followers = tuple(map(FollowerLinks, ranks[1:], processes.channels))
        self.copy_pipes = processes.copy_channels
        self._steps = GroupSteps(num_steps, memory.progress.beats)
        self._pulse = GroupPulse(memory.progress.pulses)
        return engine

    @property
    def num_ranks(self) -> int:
        return self._config.engine.degree

    @property
    def follower_pids(self) -> tuple[int, ...]:
        return self._processes.pids[1:] if self._processes is not None else ()

    def num_steps(self, own: int) -> int:
        """Returns the worker's step count, which stops with any rank. Args: own: step count of this process."""
        return self._steps.count() if self._steps is not None else own

    def is_silent(self) -> bool:
        """Returns whether a follower's process is stopped. The worker then sends no heartbeats."""
        return self._pulse is not None and self._pulse.is_silent()

    def stop(self, timeout_s: float) -> None:
        """Ends the followers. The engine thread has ended."""
        if self._processes is not None:
            processes, self._processes = self._processes, None
            self._steps = self._pulse = None
            processes.stop(timeout_s)

    def _on_death(self, text: str) -> None:
        logger.error("%s, and the worker with it", text)
        if self._steps is None and self._has_failed.wait(FAILURE_GRACE_S):
            return
        logging.shutdown()
        os._exit(exit_codes.RANK_FAILED)
