"""Parts of the GPU tests side by side: what shares a GPU, in a time of its own."""

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from tests.gpu.conftest import visible_gpu
from tests.gpu.parts import PARTS
from tests.gpu.together import MAX_CLUSTERS, GpuShares, Run, command_of, main, run_together, stop

# Reports when asked to stop; its child does not end by itself.
STUBBORN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("FAILED one test", child.pid, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("| `engine` | 1 failed |", flush=True)
"""


class Host:
    """GPUs on which each part takes its time, and a check of what runs on each."""

    def __init__(self, num_gpus: int) -> None:
        self.shares = GpuShares(num_gpus)
        self.now = 0.0
        self.running: list[FakeRun] = []

    def start(self, name: str, gpus: Sequence[int]) -> Run:
        self.running = [run for run in self.running if not run.has_ended()]
        self.running.append(FakeRun(self, name, gpus))
        for gpu in gpus:
            parts = [PARTS[run.name] for run in self.running if gpu in run.gpus]
            assert sum(part.load for part in parts) <= 1 + 1e-9
            assert sum(part.has_clusters for part in parts) <= MAX_CLUSTERS
        return cast("Run", self.running[-1])

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeRun:
    def __init__(self, host: Host, name: str, gpus: Sequence[int]) -> None:
        self.name, self.gpus, self.was_stopped = name, gpus, False
        self._host, self._end = host, host.now + PARTS[name].seconds

    def has_ended(self) -> bool:
        return self.was_stopped or self._host.now >= self._end

    def interrupt(self) -> None:
        self.was_stopped = True

    def end(self, seconds: float) -> None:
        assert self.has_ended()


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_every_part_runs_once_and_in_less_time_than_one_after_another(num_gpus: int) -> None:
    host = Host(num_gpus)
    ended = run_together(list(PARTS), host.shares, host.start, 10_000, lambda: host.now, host.sleep)
    assert Counter(run.name for run in ended) == Counter([*PARTS])
    assert not any(cast("FakeRun", run).was_stopped for run in ended)
    # At best all clusters run two at a time on all GPUs.
    of_clusters = sum(part.seconds * min(part.num_gpus, num_gpus) for part in PARTS.values() if part.has_clusters)
    assert host.now < 1.3 * of_clusters / MAX_CLUSTERS / num_gpus + max(part.seconds for part in PARTS.values())


def test_fewer_parts_share_a_smaller_gpu() -> None:
    attention = PARTS["attention"]

    def num_at_once(memory_bytes: float) -> int:
        shares = GpuShares(1, memory_bytes)
        return sum(shares.take(attention) is not None for _ in range(9))

    assert num_at_once(141e9) == 3 and num_at_once(80e9) == 1
    shares = GpuShares(1, 1e9)
    assert shares.take(attention) == [0] and shares.take(attention) is None
    shares.give_back(attention, [0])
    assert shares.take(attention) == [0]


def test_the_limit_stops_what_runs_and_starts_nothing_more() -> None:
    host = Host(1)
    names = sorted(PARTS, key=lambda name: -PARTS[name].seconds)[:10]
    ended = run_together(names, host.shares, host.start, 20, lambda: host.now, host.sleep)
    assert 0 < len(ended) < len(names)
    assert all(cast("FakeRun", run).was_stopped for run in ended) and host.now < 22


def test_a_stopped_part_reports_and_leaves_no_process(tmp_path: Path) -> None:
    run = Run("engine", [0], tmp_path, [sys.executable, "-c", STUBBORN])
    deadline = time.monotonic() + 20
    while "FAILED" not in run.output.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    stop([run])
    assert run.has_ended() and not run.has_passed
    failed, row = run.summary().splitlines()
    assert row == "stopped before its end: | `engine` | 1 failed |"
    child = int(failed.split()[-1])
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the part's child still runs")


def test_a_part_without_a_gpu_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpu(0) == ""
    run = Run("memory", [0], tmp_path, command_of("memory", tmp_path / "temporary"))
    run.end(60)
    assert not run.has_passed
    assert "no result" in run.summary() and "needs an NVIDIA GPU" in run.output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-part"], "no part"),
        (["--seconds=nan"], "must be positive"),
        # Parts may follow options.
        (["--seconds", "9", "no-such-part"], "no part"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), *arguments])
    assert message in capsys.readouterr().err
