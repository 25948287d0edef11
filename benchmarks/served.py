"""`tandem serve` in processes of its own, which end with the benchmark whatever becomes of it."""

import argparse
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

from tandem.deploy.cli.serve_config import cluster_config
from tandem.deploy.cli.serve_options import add_serve_options
from tandem.deploy.host.process_tree import descendants, die_with_parent, end_processes
from tandem.deploy.launcher import Cluster
from tandem.deploy.serve import announce_and_wait, run_cluster
from tandem.processes import ProcessId

# Beyond what the cluster itself takes at most to stop once its requests have ended.
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
# A timer of 0 would be none.
_SOON_S = 0.001
_AGAIN_S = 5.0
_ADDRESS = re.compile(r"over gRPC at (\S+)")
_LAST_LINES = 15
ROOT = Path(__file__).parents[1]


class StartError(Exception):
    """A cluster did not start, or not in time."""


class Served:
    """A cluster that is up. Use as a context manager, which ends all its processes.

    Attributes:
        address: of its gRPC port.
        ready_s: from the start of its process until it said where it is, in seconds.
        lines: what it has printed so far.
        log_dir: of its processes.
        process: the command's own.
    """

    def __init__(self, flags: Sequence[str], log_dir: Path, start_timeout_s: float, token_file: Path | None = None):
        """
        Args:
            flags: of `tandem serve`; its ports are any that are free.
            token_file: where the token goes with which the workers can be asked about their page accounts; None: it is
                not told.

        Raises:
            StartError: it did not start within `start_timeout_s`.
        """
        command = (
            ["-m", "tandem.deploy.cli.main", "serve"]
            if token_file is None
            else ["-m", "benchmarks.served", str(token_file)]
        )
        self.log_dir = log_dir
        self.lines: list[str] = []
        self._token_file = token_file
        began = time.monotonic()
        self.process = subprocess.Popen(
            # A cluster of the usual name may run beside it.
            [
                sys.executable,
                *command,
                *flags,
                "--name",
                f"bench-{secrets.token_hex(6)}",
                "--grpc-port",
                "0",
                "--http-port",
                "0",
                "--log-dir",
                str(log_dir),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ctrl-C is for the benchmark, which stops the cluster in its own time.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            # If the benchmark is killed, the cluster's guard is told to stop.
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

    @property
    def cluster_token(self) -> str:
        assert self._token_file is not None
        return self._token_file.read_text()

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
    """Raises TimeoutError in the midst of what stands in it if that has not ended by then, or by when a `within` around
    it is to end. For the main thread."""

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what}: not over within {seconds:.0f} s")

    if seconds <= 0:
        raise TimeoutError(f"{what}: no time is left for it")
    began = time.monotonic()
    around = signal.getitimer(signal.ITIMER_REAL)[0]
    previous = signal.signal(signal.SIGALRM, on_alarm)
    # It is raised again and again: Python drops what a signal raises within a callback of its own.
    signal.setitimer(signal.ITIMER_REAL, min(seconds, around or seconds), _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if around:
            left = around - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, _SOON_S), _AGAIN_S)


def main(argv: Sequence[str]) -> int:
    """`tandem serve` that writes the cluster's token to a file first: its first argument, for its user alone."""
    token_file, *flags = argv
    parser = argparse.ArgumentParser(prog="benchmarks.served", allow_abbrev=False)
    add_serve_options(parser)
    config = cluster_config(parser.parse_args(flags), {})

    def use(cluster: Cluster, stop: threading.Event) -> int:
        with open(token_file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(cluster.cluster_token)
        return announce_and_wait(config, cluster, stop)

    return run_cluster(config, use)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
