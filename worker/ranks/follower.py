"""The process of a follower: `python -m tandem.worker.ranks.follower`, started by worker/ranks/processes.py."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection

from tandem import __version__, exit_codes, logs
from tandem.open_files import raise_open_files_limit
from tandem.prctl import die_with_parent
from tandem.worker.ranks.channel import MessageChannel
from tandem.worker.ranks.group import FollowerGroup, StartFailure
from tandem.worker.ranks.memory import RankMemory
from tandem.worker.ranks.seat import FollowerOrder, Seat
from tandem.worker.ranks.standstill import PULSE_INTERVAL_S, WAIT_FACTOR

logger = logging.getLogger(__name__)


def main(version: str, leader_pid: int, control_fd: int, lanes_fd: int, copies_fd: int, memory_fd: int) -> int:
    """Serves until the leader stops it or ends. Returns the exit status. Args: version: the leader's."""
    # The kernel kills this process even if it is stopped, or waits for a device.
    die_with_parent(signal.SIGKILL)
    if os.getppid() != leader_pid:
        return exit_codes.RANK_FAILED
    # A terminal sends it to the whole group; the leader decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_open_files_limit()
    leader = Connection(control_fd)
    try:
        if version != __version__:
            # Orders, records of forward passes and shared memory have no version of their own.
            raise RuntimeError(
                f"it is of tandem {__version__}, but its leader of {version}: another version was installed while the "
                "worker started; the next start takes one version"
            )
        # Imports the worker's modules.
        order: FollowerOrder = leader.recv()
        ranks = order.ranks
        logs.configure(log_name(order), order.worker.log)
        lanes, copies = (MessageChannel(socket.socket(fileno=fd)) for fd in (lanes_fd, copies_fd))
        wait_timeout_s = WAIT_FACTOR * order.worker.stall_timeout_s
        memory = RankMemory(memory_fd, ranks.degree, wait_timeout_s)
        seat = Seat(order, FollowerGroup(ranks, leader, memory.progress, wait_timeout_s), memory, lanes, copies)
        threading.Thread(target=_pulse, args=(seat,), name="pulse", daemon=True).start()
        order.run(seat)
    except Exception as error:
        logger.exception("a follower failed")
        _tell(leader, StartFailure(str(error) or type(error).__name__, isinstance(error, ValueError)))
        return exit_codes.RANK_FAILED
    return 0


def _pulse(seat: Seat) -> None:
    while True:
        seat.memory.progress.pulse(seat.order.ranks)
        time.sleep(PULSE_INTERVAL_S)


def log_name(order: FollowerOrder) -> str:
    return f"{order.worker.worker_id}-rank{order.ranks.rank}"


def _tell(leader: Connection, failure: StartFailure) -> None:
    try:
        leader.send(failure)
    except OSError:
        logger.info("the leader has ended")


if __name__ == "__main__":
    status = main(sys.argv[1], *map(int, sys.argv[2:]))
    logging.shutdown()
    # Threads of libraries may wait for a peer that has gone.
    os._exit(status)
