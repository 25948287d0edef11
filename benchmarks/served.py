"""Runs `tandem serve` as a child process that never outlives the benchmark."""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.prctl import die_with_parent
from tandem.processes import ProcessId

# More than the cluster's own limit for stopping.
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
# setitimer takes 0 as "disarm".
_SOON_S = 0.001
_AGAIN_S = 5.0
_ADDRESS = re.compile(r"over gRPC at (\S+)")
_LAST_LINES = 15
ROOT = Path(__file__).parents[1]


class StartError(Exception):
    """A cluster did not start in time."""


class Served:
    """A running cluster on free ports. Use as a context manager.

    Attributes:
        name: for commands.
        ready_s: seconds from the process's start until it printed its address.
    """

    def __init__(self, flags: Sequence[str], log_dir: Path, start_timeout_s: float) -> None:
        """Args: flags: of `tandem serve`. Raises StartError."""
        self.log_dir = log_dir
        self.name = f"bench-{secrets.token_hex(6)}"
        self.lines: list[str] = []
        began = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tandem.deploy.cli.main", "serve", *flags),
                *("--name", self.name, "--grpc-port", "0", "--http-port", "0"),
                *("--log-dir", str(log_dir)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ctrl-C is for the benchmark, which stops the cluster.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            # If the benchmark is killed, the cluster stops.
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.address = self._wait_for_address(began + start_timeout_s)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - began

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        tree = [ProcessId.of(self.process.pid), *descendants(self.process.pid)] if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_processes(tree, 0.0)
            self.process.wait()
        self._reader.join(STOP_TIMEOUT_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def _wait_for_address(self, deadline: float) -> str:
        while time.monotonic() < deadline:
            if found := _ADDRESS.search("\n".join(self.lines)):
                return found[1]
            if self.process.poll() is not None:
                self._reader.join(STOP_TIMEOUT_S)
                raise StartError("the cluster has ended: " + "\n".join(self.lines[-_LAST_LINES:]))
            time.sleep(_POLL_S)
        raise StartError("the cluster did not start in time: " + "\n".join(self.lines[-_LAST_LINES:]))


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, or at an enclosing `within`'s limit. Main thread only."""

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what}: not over within {seconds:.0f} s")

    if seconds <= 0:
        raise TimeoutError(f"{what}: no time is left")
    began = time.monotonic()
    around = signal.getitimer(signal.ITIMER_REAL)[0]
    previous = signal.signal(signal.SIGALRM, on_alarm)
    # Repeat the signal: Python drops an exception that a signal handler raises inside a C callback.
    signal.setitimer(signal.ITIMER_REAL, min(seconds, around or seconds), _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if around:
            left = around - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, _SOON_S), _AGAIN_S)
