"""The GPU opens during the imports, and a failure is left to torch."""

import ctypes
import logging
from typing import Any

import pytest

from tandem.deploy.host.gpu_opening import GpuOpening


class FakeDriver:
    """A fake NVIDIA driver. Records calls; all succeed except `failing`."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing

    def __call__(self, name: str) -> "FakeDriver":
        assert name == "libcuda.so.1"
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGetPCIBusId":
                buffer, size, _ = arguments
                assert size == ctypes.sizeof(buffer)
                buffer.value = b"0000:C1:00.0"
            return 100 * (name == self._failing)

        return call


def opened(driver: FakeDriver) -> list[str]:
    """The devices given to run_beside."""
    beside: list[str] = []

    def run_beside(pci_id: str) -> str:
        beside.append(pci_id)
        return "runs"

    GpuOpening(driver, run_beside).wait()
    return beside


def test_the_gpu_is_opened_and_the_process_pinned() -> None:
    driver = FakeDriver()
    assert opened(driver) == ["0000:C1:00.0"]
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet"])
def test_without_a_gpu_nothing_is_done(failing: str) -> None:
    driver = FakeDriver(failing)
    assert opened(driver) == [] and driver.calls[-1] == failing


def test_a_gpu_without_a_pci_id_is_opened() -> None:
    driver = FakeDriver("cuDeviceGetPCIBusId")
    assert opened(driver) == [] and driver.calls[-1] == "cuDevicePrimaryCtxRetain"


def test_a_missing_driver_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    def no_driver(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with caplog.at_level(logging.INFO):
        GpuOpening(no_driver).wait()
    assert "libcuda.so.1" in caplog.text
