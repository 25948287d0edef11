"""Parts of the GPU tests side by side: what shares a GPU, in a time of its own."""

import heapq
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from tests.gpu.parts import PARTS
from tests.gpu.together import MAX_CLUSTERS, GpuShares, Run, main, run_together


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

    def stop(self) -> None:
        self.was_stopped = not self.has_ended()


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_every_part_runs_once_and_in_less_time_than_one_after_another(num_gpus: int) -> None:
    host = Host(num_gpus)
    ended = run_together(list(PARTS), host.shares, host.start, 10_000, lambda: host.now, host.sleep)
    assert Counter(run.name for run in ended) == Counter([*PARTS])
    assert not any(cast("FakeRun", run).was_stopped for run in ended)
    # The least: all clusters two at a time, on all GPUs.
    of_clusters = sum(part.seconds * part.num_gpus for part in PARTS.values() if part.has_clusters)
    assert host.now < 1.3 * of_clusters / MAX_CLUSTERS / num_gpus + max(part.seconds for part in PARTS.values())


def test_one_gpu_gets_no_parts_for_two() -> None:
    shares = GpuShares(1)
    assert {name for name, part in PARTS.items() if not shares.can_ever_take(part)} >= {
        "two-gpus-ranks",
        "two-gpus-nvlink",
        "two-gpus-nccl",
    }


def test_the_limit_stops_what_runs_and_starts_nothing_more() -> None:
    host = Host(1)
    names = heapq.nlargest(10, [name for name, part in PARTS.items() if part.num_gpus == 1], lambda n: PARTS[n].seconds)
    ended = run_together(names, host.shares, host.start, 30, lambda: host.now, host.sleep)
    assert 0 < len(ended) < len(names)
    assert all(cast("FakeRun", run).was_stopped for run in ended) and host.now < 32


def test_a_part_without_a_gpu_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = Run("memory", [0], tmp_path)
    run._process.wait(60)
    run.stop()
    assert not run.has_passed
    assert "no result" in run.summary() and "needs an NVIDIA GPU" in run.output.read_text()


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "no-such-part"])
    assert "no part 'no-such-part'" in capsys.readouterr().err
