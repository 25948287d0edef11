"""Workers of one GPU start one after another."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.host.gpu_opening import GpuOpening
from tandem.deploy.host.gpu_turn import GpuTurn
from tests.unit.deploy.host.test_gpu_opening import FakeDriver

GPU, OTHER_GPU = "0000:C1:00.0", "0000:C2:00.0"
WAIT_S = 30.0
HOLDING = """
import sys, time
from pathlib import Path
from tandem.deploy.host.gpu_turn import GpuTurn
GpuTurn(Path(sys.argv[1]), lambda: None).take(sys.argv[2])
print("taken", flush=True)
time.sleep(600)
"""


class Starting:
    """A worker's start on a thread. Attributes: waits, taken: set then."""

    def __init__(self, directory: Path) -> None:
        self.waits, self.taken, self._may_end = threading.Event(), threading.Event(), threading.Event()
        self._turn = GpuTurn(directory, self.waits.set)
        self._thread = threading.Thread(target=self._start)
        self._thread.start()

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _start(self) -> None:
        with self._turn:
            self._turn.take(GPU)
            self.taken.set()
            assert self._may_end.wait(WAIT_S)


def test_the_second_start_waits_for_the_end_of_the_first(tmp_path: Path) -> None:
    first = Starting(tmp_path)
    assert first.taken.wait(WAIT_S) and not first.waits.is_set()
    second = Starting(tmp_path)
    assert second.waits.wait(WAIT_S) and not second.taken.is_set()
    # Another GPU is free.
    GpuTurn(tmp_path, lambda: pytest.fail("waited")).take(OTHER_GPU)
    first.end()
    assert second.taken.wait(WAIT_S)
    second.end()


def test_a_killed_worker_gives_its_turn_back(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDING, tmp_path, GPU], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"taken\n"
        waiting = Starting(tmp_path)
        assert waiting.waits.wait(WAIT_S) and not waiting.taken.is_set()
        holder.kill()
        assert waiting.taken.wait(WAIT_S)
        waiting.end()


def test_the_wait_has_a_limit(tmp_path: Path) -> None:
    with GpuTurn(tmp_path, lambda: None) as turn:
        turn.take(GPU)
        with pytest.raises(TimeoutError, match=r"another worker on the GPU 0000:C1:00\.0 has not ended its start"):
            GpuTurn(tmp_path, lambda: None, timeout_s=0.1).take(GPU)


def test_nothing_is_on_the_gpu_before_the_turn(tmp_path: Path) -> None:
    waits = threading.Event()
    driver: Any = FakeDriver()
    with GpuTurn(tmp_path, lambda: None) as earlier:
        earlier.take(GPU)
        opening = GpuOpening(driver, str, turn=GpuTurn(tmp_path, waits.set))
        assert waits.wait(WAIT_S)
        assert driver.calls == ["cuInit", "cuDeviceGet", "cuDeviceGetPCIBusId"]
    opening.wait()
    assert driver.calls[-1] == "cuDevicePrimaryCtxRetain"


def test_a_failed_turn_ends_the_start(tmp_path: Path) -> None:
    driver: Any = FakeDriver()
    tmp_path.chmod(0o777)
    opening = GpuOpening(driver, str, turn=GpuTurn(tmp_path, lambda: None))
    with pytest.raises(PermissionError, match="no other user can write to"):
        opening.wait()
    assert "cuDevicePrimaryCtxRetain" not in driver.calls
