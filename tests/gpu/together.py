"""All parts of the GPU tests side by side on this host's GPUs: `make test-gpu TOGETHER=DIRECTORY`.

Writes each part's output into the directory, and prints the parts' rows for docs/gpu.md.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.gpu.parts import PARTS, ROOT, Part

POLL_S = 0.5
# For the reports of parts that are stopped.
STOP_S = 15.0
# Bytes of a GPU's memory for which the parts' loads are; of less, each part takes more.
LOADED_BYTES = 140 * 10**9
# Parts with clusters on a GPU: more of them only wait for each other's starts.
MAX_CLUSTERS = 2
# Of a test that sets none: others take its time.
TEST_TIMEOUT_S = 300


class GpuShares:
    """What the running parts leave of each GPU."""

    def __init__(self, num_gpus: int, memory_bytes: float = LOADED_BYTES) -> None:
        """Args: memory_bytes: of the smallest GPU."""
        self._free = [1.0] * num_gpus
        self._scale = max(1.0, LOADED_BYTES / memory_bytes)
        self._num_clusters = [0] * num_gpus

    def take(self, part: Part) -> list[int] | None:
        """Returns the numbers of the GPUs that the part gets, or None if it must wait."""
        fitting = [
            gpu
            for gpu, free in enumerate(self._free)
            if free >= self._load(part) - 1e-9 and (not part.has_clusters or self._num_clusters[gpu] < MAX_CLUSTERS)
        ]
        num_gpus = min(part.num_gpus, len(self._free))
        if len(fitting) < num_gpus:
            return None
        taken = sorted(fitting, key=lambda gpu: -self._free[gpu])[:num_gpus]
        for gpu in taken:
            self._free[gpu] -= self._load(part)
            self._num_clusters[gpu] += part.has_clusters
        return taken

    def give_back(self, part: Part, gpus: Sequence[int]) -> None:
        for gpu in gpus:
            self._free[gpu] += self._load(part)
            self._num_clusters[gpu] -= part.has_clusters

    def _load(self, part: Part) -> float:
        return min(1.0, self._scale * part.load)


class Run:
    """A part in a process group of its own."""

    def __init__(self, name: str, gpus: Sequence[int], directory: Path, command: Sequence[str]) -> None:
        from tests.gpu.conftest import visible_gpu

        self.name = name
        self.gpus = gpus
        self.output = directory / f"{name}.txt"
        self._was_stopped = False
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(visible_gpu, gpus))}
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def interrupt(self) -> None:
        """Asks for a report of what has run so far."""
        self._was_stopped = True
        self._process.send_signal(signal.SIGINT)

    def end(self, seconds: float) -> None:
        """Waits so long for the part's end, and kills what is left of its processes."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)

    def summary(self) -> str:
        """Returns failed tests and the part's row."""
        lines = self.output.read_text(errors="replace").splitlines()
        shown = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        row = next((line for line in reversed(lines) if line.startswith("| `")), f"| `{self.name}` | no result |")
        shown.append(f"stopped before its end: {row}" if self._was_stopped else row)
        return "\n".join(shown)

    @property
    def has_passed(self) -> bool:
        return not self._was_stopped and self._process.returncode == 0


def stop(runs: Sequence[Run], clock: Callable[[], float] = time.monotonic) -> None:
    """Stops running parts, all at once."""
    for run in runs:
        if not run.has_ended():
            run.interrupt()
    deadline = clock() + STOP_S
    for run in runs:
        run.end(deadline - clock())


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
        while (waiting or running) and clock() < deadline:
            for run in [run for run in running if run.has_ended()]:
                run.end(0.0)
                running.remove(run)
                ended.append(run)
                shares.give_back(PARTS[run.name], run.gpus)
            for name in list(waiting):
                if (gpus := shares.take(PARTS[name])) is not None:
                    waiting.remove(name)
                    running.append(start(name, gpus))
            sleep(POLL_S)
    finally:
        stop(running, clock)
    return ended + running


def command_of(name: str, directory: Path) -> list[str]:
    """Returns the command of a part. Args: directory: for its temporary files, of which older ones are removed."""
    command = [sys.executable, "-m", "tests.gpu.parts", name, "-v", "-o", f"timeout={TEST_TIMEOUT_S}"]
    return [*command, "-n", str(PARTS[name].num_processes), "-p", "no:cacheprovider", f"--basetemp={directory}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs parts of the GPU tests side by side on all GPUs of this host.")
    parser.add_argument("directory", type=Path, help="for the parts' output")
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit on all of them (default: 3600)")
    # Parts may follow the options.
    arguments = parser.parse_intermixed_args(argv)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)!r}; the parts are {', '.join(PARTS)}")
    if not 0 < arguments.seconds < math.inf:
        parser.error("--seconds must be positive")
    import torch

    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU and a torch made for CUDA (docs/gpu.md)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = list(dict.fromkeys(arguments.parts)) or list(PARTS)
    directory: Path = arguments.directory.resolve()
    temporary = directory / "temporary"
    temporary.mkdir(parents=True, exist_ok=True)

    def start(name: str, gpus: Sequence[int]) -> Run:
        return Run(name, gpus, directory, command_of(name, temporary / name))

    num_gpus = torch.cuda.device_count()
    memory_bytes = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(num_gpus))
    ended = run_together(names, GpuShares(num_gpus, memory_bytes), start, arguments.seconds)
    for run in sorted(ended, key=lambda run: names.index(run.name)):
        print(run.summary(), flush=True)
    missing = [name for name in names if name not in {run.name for run in ended}]
    if missing:
        print(f"not run: {', '.join(missing)}", file=sys.stderr)
    return 0 if not missing and all(run.has_passed for run in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
