"""The followers of a worker, as child processes of its leader."""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from socket import socket, socketpair
from typing import TYPE_CHECKING, NamedTuple

from tandem import __version__
from tandem.engine.ranks.config import RankConfig
from tandem.worker.config import WorkerConfig
from tandem.worker.ranks.channel import MessageChannel
from tandem.worker.ranks.group import LeaderGroup
from tandem.worker.ranks.memory import RankMemory
from tandem.worker.ranks.seat import FollowerOrder, Seat
from tandem.worker.ranks.standstill import WAIT_FACTOR

if TYPE_CHECKING:
    from tandem.worker.base import StoreConnection, WorkerRole

logger = logging.getLogger(__name__)

SPAWN_TIMEOUT_S = 30.0
# Time in which a failed follower's message is read after its end.
FAILURE_TIMEOUT_S = 1.0


class _Follower(NamedTuple):
    process: "subprocess.Popen[bytes]"
    control: Connection
    lanes: MessageChannel
    copies: MessageChannel


class RankProcesses:
    """Starts, watches and stops the followers.

    Attributes:
        group: agreement with them while they start.
        memory: shared with them.
        pids: of all ranks, the leader first.
        channels: to the lanes of each follower, by rank from 1.
        copy_channels: to the copies of each follower between its pool and the page store.
    """

    def __init__(
        self,
        worker: WorkerConfig,
        role: "WorkerRole",
        incarnation: str,
        run: Callable[[Seat], None],
        on_death: Callable[[str], None],
        store: "StoreConnection | None" = None,
    ) -> None:
        """
        Args:
            run: main function of each follower, as in FollowerOrder.
            on_death: called once, on a thread of this object, if a follower ends before `stop`.
            store: the leader's, before its start.
        """
        self._degree = worker.engine.degree
        self._worker = replace(worker, api_keys=(), key_file=None)
        self._role = role
        self._incarnation = incarnation
        self._run = run
        self._on_death = on_death
        self._store = store
        self._is_stopping = threading.Event()
        wait_timeout_s = WAIT_FACTOR * worker.stall_timeout_s
        self.memory = RankMemory.create(self._degree, wait_timeout_s)
        # The kernel kills followers when the thread that started them ends, so that thread also watches them.
        spawned: Future[list[_Follower]] = Future()
        self._thread = threading.Thread(target=self._watch, args=(spawned,), name="ranks", daemon=True)
        self._thread.start()
        self._followers = spawned.result(SPAWN_TIMEOUT_S)
        self.pids = (os.getpid(), *(follower.process.pid for follower in self._followers))
        self.channels = tuple(follower.lanes for follower in self._followers)
        self.copy_channels = tuple(follower.copies for follower in self._followers)
        connections = [follower.control for follower in self._followers]
        self.group = LeaderGroup(connections, self.memory.progress, wait_timeout_s)

    def find_failure(self) -> Exception | None:
        """Returns the error with which a follower ended, if it told one."""
        return self.group.find_failure(FAILURE_TIMEOUT_S)

    def stop(self, timeout_s: float) -> None:
        """Asks the followers to end, and kills them after the timeout."""
        self._is_stopping.set()
        self.memory.progress.stop()
        deadline = time.monotonic() + timeout_s
        for rank, follower in enumerate(self._followers, 1):
            try:
                follower.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d has not ended in time and is killed", rank)
                follower.process.kill()
                follower.process.wait()
            follower.control.close()
            follower.lanes.close()
            follower.copies.close()
        self._thread.join()
        self.memory.close()

    # --- The thread that starts and watches ---

    def _watch(self, spawned: "Future[list[_Follower]]") -> None:
        try:
            followers = [self._spawn(rank) for rank in range(1, self._degree)]
        except BaseException as error:
            spawned.set_exception(error)
            return
        ends = {os.pidfd_open(follower.process.pid): rank for rank, follower in enumerate(followers, 1)}
        spawned.set_result(followers)
        poll = select.poll()
        for descriptor in ends:
            poll.register(descriptor, select.POLLIN)
        while ends:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                os.close(descriptor)
                rank = ends.pop(descriptor)
                if not self._is_stopping.is_set():
                    self.memory.progress.abort()
                    self._on_death(f"rank {rank} {_describe(followers[rank - 1].process.wait())}")
                    self._is_stopping.set()

    def _spawn(self, rank: int) -> _Follower:
        control, control_there = socketpair()
        lanes, lanes_there = MessageChannel.pair()
        copies, copies_there = MessageChannel.pair()
        with control_there, lanes_there, copies_there:
            fds = (control_there.fileno(), lanes_there.fileno(), copies_there.fileno(), self.memory.fd)
            command = [sys.executable, "-m", "tandem.worker.ranks.follower", __version__]
            process = subprocess.Popen(
                [*command, *map(str, (os.getpid(), *fds))],
                stdin=subprocess.DEVNULL,
                # The code may be on this process's path only, as with ship_code.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=fds,
            )
        connection = _connection(control)
        ranks = RankConfig(rank, self._degree)
        connection.send(FollowerOrder(ranks, self._worker, self._role, self._incarnation, self._run, self._store))
        return _Follower(process, connection, MessageChannel(lanes), MessageChannel(copies))


def _connection(end: socket) -> Connection:
    return Connection(end.detach())


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        # Most real-time signals have no name.
        return f"was ended by signal {-status}"
