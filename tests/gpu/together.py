"""All parts of the GPU tests side by side on this host's GPUs: `make test-gpu TOGETHER=DIRECTORY`.

Writes each part's output into the directory, and prints the parts' rows for docs/gpu.md.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.gpu.conftest import visible_gpu
from tests.gpu.parts import PARTS, ROOT, Part

POLL_S = 0.5
# For the report of a part that is stopped.
STOP_S = 15.0
# Parts with clusters on a GPU: more of them only wait for each other's starts.
MAX_CLUSTERS = 2
# Of a test that sets none: others take its time.
TEST_TIMEOUT_S = 300


class GpuShares:
    """What the running parts leave of each GPU."""

    def __init__(self, num_gpus: int) -> None:
        self._free = [1.0] * num_gpus
        self._num_clusters = [0] * num_gpus

    def can_ever_take(self, part: Part) -> bool:
        return part.num_gpus <= len(self._free)

    def take(self, part: Part) -> list[int] | None:
        """Returns the numbers of the GPUs that the part gets, or None if it must wait."""
        fitting = [
            gpu
            for gpu, free in enumerate(self._free)
            if free >= part.load - 1e-9 and (not part.has_clusters or self._num_clusters[gpu] < MAX_CLUSTERS)
        ]
        if len(fitting) < part.num_gpus:
            return None
        taken = sorted(fitting, key=lambda gpu: -self._free[gpu])[: part.num_gpus]
        for gpu in taken:
            self._free[gpu] -= part.load
            self._num_clusters[gpu] += part.has_clusters
        return taken

    def give_back(self, part: Part, gpus: Sequence[int]) -> None:
        for gpu in gpus:
            self._free[gpu] += part.load
            self._num_clusters[gpu] -= part.has_clusters


class Run:
    """A part in a process group of its own."""

    def __init__(self, name: str, gpus: Sequence[int], directory: Path) -> None:
        part = PARTS[name]
        self.name = name
        self.gpus = gpus
        self.output = directory / f"{name}.txt"
        command = [sys.executable, "-m", "tests.gpu.parts", name, "-v", "-o", f"timeout={TEST_TIMEOUT_S}"]
        command += ["-n", str(part.num_processes), "-p", "no:cacheprovider", f"--basetemp={directory / name}"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(visible_gpu, gpus))}
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Asks a running part for its report, and kills what is left of it."""
        if not self.has_ended():
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def summary(self) -> str:
        """Returns failed tests and the part's row."""
        lines = self.output.read_text(errors="replace").splitlines()
        shown = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "| `"))]
        if not any(line.startswith("| `") for line in shown):
            shown.append(f"| `{self.name}` | no result: see {self.output} |")
        return "\n".join(shown)

    @property
    def has_passed(self) -> bool:
        return self._process.returncode == 0


def run_together(
    names: Sequence[str],
    shares: GpuShares,
    start: Callable[[str, Sequence[int]], Run],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Run]:
    """Runs parts, each as soon as its GPUs have room: those that need one alone first, then the longest.

    Returns them in the order of their ends.

    Args:
        seconds: after this time the running parts are stopped, and the others do not start.
    """
    waiting = sorted(names, key=lambda name: (PARTS[name].load < 1, -PARTS[name].seconds))
    running: list[Run] = []
    ended: list[Run] = []
    deadline = clock() + seconds
    try:
        while waiting or running:
            is_late = clock() >= deadline
            for run in [run for run in running if is_late or run.has_ended()]:
                run.stop()
                running.remove(run)
                ended.append(run)
                shares.give_back(PARTS[run.name], run.gpus)
            if is_late:
                break
            for name in list(waiting):
                if (gpus := shares.take(PARTS[name])) is not None:
                    waiting.remove(name)
                    running.append(start(name, gpus))
            sleep(POLL_S)
    finally:
        for run in running:
            run.stop()
    return ended


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs parts of the GPU tests side by side on all GPUs of this host.")
    parser.add_argument("directory", type=Path, help="for the parts' output")
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all that this host has GPUs for")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit on all of them (default: 3600)")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)!r}; the parts are {', '.join(PARTS)}")
    import torch

    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU and a torch made for CUDA (docs/gpu.md)")
    shares = GpuShares(torch.cuda.device_count())
    names = [name for name in arguments.parts or PARTS if shares.can_ever_take(PARTS[name])]
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    ended = run_together(names, shares, lambda name, gpus: Run(name, gpus, directory), arguments.seconds)
    for run in sorted(ended, key=lambda run: list(PARTS).index(run.name)):
        print(run.summary(), flush=True)
    missing = [name for name in arguments.parts or PARTS if name not in {run.name for run in ended}]
    if missing:
        print(f"not run: {', '.join(missing)}", file=sys.stderr)
    return 0 if not missing and all(run.has_passed for run in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
