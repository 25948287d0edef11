"""Runs the `tandem` command in its own process."""

import os
import re
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.processes import ProcessId
from tests.cluster.conftest import wait_until

TANDEM = str(Path(sys.executable).with_name("tandem"))
START_S = 120.0
GONE_S = 10.0


@dataclass
class Server:
    """Attributes: output_at: times of the lines of `output`."""

    name: str
    process: subprocess.Popen[str]
    address: str
    tree: list[ProcessId]
    output: list[str]
    output_at: list[float]

    def said_at(self, beginning: str) -> float:
        """Return the time of the first output line that begins so."""
        number = next(number for number, line in enumerate(self.output) if line.startswith(beginning))
        return self.output_at[number]

    def finish(self) -> int:
        """Return the exit status. Asserts that all processes have ended."""
        status = self.process.wait(GONE_S)
        assert [p for p in self.tree if p.is_alive()] == []
        return status


def tandem(*arguments: str, stdin: str = "", timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    if arguments[0] == "serve" and "--name" not in arguments:
        arguments = ("serve", *own_name(), *arguments[1:])
    return subprocess.run([TANDEM, *arguments], input=stdin, capture_output=True, text=True, timeout=timeout_s)


def own_name() -> tuple[str, str]:
    return "--name", f"test-{uuid.uuid4().hex[:12]}"


def start(*arguments: str, runtime_dir: Path, cwd: Path | None = None) -> Server:
    flag, name = own_name()
    process = subprocess.Popen(
        [TANDEM, "serve", flag, name, "--grpc-port", "0", "--http-port", "0", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=cwd,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_dir)},
    )
    output: list[str] = []
    output_at: list[float] = []

    def read() -> None:
        for line in process.stdout or ():
            output_at.append(time.monotonic())
            output.append(line)

    threading.Thread(target=read, daemon=True).start()

    def address() -> str:
        assert process.poll() is None, "".join(output)
        found = re.search(r"over gRPC at (\S+)", "".join(output))
        return found[1] if found else ""

    try:
        found = wait_until(address, START_S, "the server is up")
    except BaseException:
        if process.poll() is None:
            end_processes({ProcessId.of(process.pid), *descendants(process.pid)}, 0.0)
        raise
    return Server(name, process, found, [ProcessId.of(process.pid), *descendants(process.pid)], output, output_at)
