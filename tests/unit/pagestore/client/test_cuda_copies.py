"""Registration and copies on a fake device.

The real ones are tested in tests/gpu/pagestore/client/test_cuda_copies.py.
"""

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.kvcache.base import Completion
from tests.fakes.cuda_device import fake_cuda

PAGE_BYTES = 2048
OUT_OF_MEMORY = 2
TIMEOUT_S = 20.0


class FakeRegistration:
    """
    Attributes:
        pieces: size of each registered piece by its address.
        max_bytes: the driver refuses more.
        num_forgotten: errors that were taken from the device.
        has_own_addresses: whether the device has other addresses for registered memory.
    """

    def __init__(self) -> None:
        self.pieces: dict[int, int] = {}
        self.max_bytes = 2**40
        self.num_forgotten = 0
        self.has_own_addresses = False

    def register(self, address: int, num_bytes: int, flags: int) -> tuple[int]:
        if sum(self.pieces.values()) + num_bytes > self.max_bytes:
            return (OUT_OF_MEMORY,)
        self.pieces[address] = num_bytes
        return (0,)

    def unregister(self, address: int) -> tuple[int]:
        del self.pieces[address]
        return (0,)

    def forget(self) -> tuple[int]:
        self.num_forgotten += 1
        return (0,)


@pytest.fixture
def registration(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRegistration]:
    registration = FakeRegistration()
    calls = {
        "cudaHostRegister": registration.register,
        "cudaHostUnregister": registration.unregister,
        "cudaHostRegisterDefault": 0,
        "cudaGetLastError": registration.forget,
        "cudaGetDevice": lambda: (0, 0),
        "cudaDeviceAttr": SimpleNamespace(cudaDevAttrCanUseHostPointerForRegisteredMem=91),
        "cudaDeviceGetAttribute": lambda attribute, device: (0, not registration.has_own_addresses),
        "cudaGetErrorName": lambda status: (0, b"cudaErrorMemoryAllocation"),
        "cudaGetErrorString": lambda status: (0, b"out of memory"),
    }
    with fake_cuda({}, ("tandem.pagestore.client.cuda_copies",), calls):
        from tandem.pagestore.client import cuda_copies

        monkeypatch.setattr(cuda_copies, "MAX_REGISTERED_BYTES", 3 * 4096)
        yield registration


def pool_of(memory: torch.Tensor) -> Any:
    layout = SimpleNamespace(page_bytes=memory.shape[1])
    return SimpleNamespace(layout=layout, device=torch.device("cpu"), memory=memory, address=memory.data_ptr())


def open_copies(num_pages: int, num_slots: int, page_bytes: int = PAGE_BYTES) -> tuple[Any, torch.Tensor, np.ndarray]:
    from tandem.pagestore.client.cuda_copies import CudaRegionCopies

    memory = torch.randint(0, 255, (num_pages, page_bytes), dtype=torch.uint8)
    region = np.zeros((num_slots, page_bytes), np.uint8)
    return CudaRegionCopies(pool_of(memory), region), memory, region


def wait(completion: Completion) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not completion.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_pages_go_both_ways(registration: FakeRegistration) -> None:
    copies, memory, region = open_copies(50, 60)
    before = memory.clone().numpy()
    slots = list(range(59, 9, -1))
    wait(copies.copy_out(range(50), slots))
    assert (region[slots] == before).all() and not region[:10].any()
    wait(copies.copy_in(slots[:2], [7, 3]))
    assert (memory[7].numpy() == before[0]).all() and (memory[3].numpy() == before[1]).all()
    copies.close()


def test_region_is_registered_in_pieces_that_end_with_pages(
    registration: FakeRegistration, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        copies, _, region = open_copies(2, 15)
    start = region.ctypes.data
    sizes = [3 * 4096, 3 * 4096, 3 * 2048]
    assert registration.pieces == {start: sizes[0], start + 12288: sizes[1], start + 24576: sizes[2]}
    assert "s per GiB" in caplog.text
    copies.close()
    assert registration.pieces == {}
    assert not [t for t in threading.enumerate() if t.name.startswith("copy-") and t.is_alive()]


def test_piece_is_a_multiple_of_odd_pages(registration: FakeRegistration) -> None:
    copies, _, _ = open_copies(2, 9, page_bytes=6144)
    assert list(registration.pieces.values()) == [12288, 12288, 12288, 12288, 6144]
    copies.close()


def test_refused_registration_leaves_nothing(registration: FakeRegistration) -> None:
    registration.max_bytes = 20_000
    with pytest.raises(
        RuntimeError, match=r"(?s)registers only 0\.00 of 0\.00 GiB.*out of memory.*smaller store_memory"
    ):
        open_copies(2, 15)
    assert registration.pieces == {} and registration.num_forgotten == 1


def test_device_with_own_addresses_of_host_memory_is_refused(registration: FakeRegistration) -> None:
    registration.has_own_addresses = True
    with pytest.raises(RuntimeError, match="cannot use the addresses of registered host memory"):
        open_copies(2, 2)
    assert registration.pieces == {}


def test_page_that_fits_no_piece_is_refused(registration: FakeRegistration) -> None:
    with pytest.raises(RuntimeError, match="pages of 2050 bytes do not end with"):
        open_copies(2, 2, page_bytes=2050)
    assert registration.pieces == {}


def test_close_waits_for_copies_before_it_ends_the_registration(registration: FakeRegistration) -> None:
    copies, memory, region = open_copies(40, 40)
    completion = copies.copy_out(range(40), range(40))
    copies.close()
    assert completion.done() and (region == memory.numpy()).all()


def test_submitted_copies_are_few_and_not_of_the_engine_thread(
    registration: FakeRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.engine.kvcache.batched_copies import PageCopies
    from tandem.pagestore.client import cuda_copies

    monkeypatch.setattr(cuda_copies, "BATCH_BYTES", 16 * PAGE_BYTES)
    threads, batches, unfinished = [], [], []
    original = PageCopies.copy
    _, memory, region = opened = open_copies(72, 72)

    def copy(self: PageCopies, dst: int, dst_pages: Any, src: int, src_pages: Any, stream: int) -> None:
        threads.append(threading.current_thread().name)
        batches.append(len(src_pages))
        original(self, dst, dst_pages, src, src_pages, stream)
        unfinished.append(sum(batches) - int((region == memory.numpy()).all(axis=1).sum()))

    monkeypatch.setattr(PageCopies, "copy", copy)
    wait(opened[0].copy_out(range(72), range(72)))
    assert batches == [16, 16, 16, 16, 8] and set(threads) == {"copy-out"}
    assert max(unfinished) <= 2 * 16
    opened[0].close()


def test_failed_submission_is_reported(registration: FakeRegistration, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.engine.kvcache.batched_copies import PageCopies

    def fail(*arguments: Any) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(PageCopies, "copy", fail)
    copies, _, _ = open_copies(2, 2)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        wait(copies.copy_in([0], [1]))
    copies.close()
