"""Pages between a GPU's pool and a registered region."""

import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tandem.engine.kvcache.base import Completion
from tandem.pagestore.region import Region
from tests.fakes.page_layout import OpaqueLayout

LAYOUT = OpaqueLayout(16, 2**18)
NUM_PAGES = 512
NUM_SLOTS = 768
TIMEOUT_S = 60.0
# About 0.5 s, much longer than a copy.
SLEEP_CYCLES = 1_000_000_000
# Much less than the copy of 512 pages, or their submission.
MAX_START_S = 0.0005


@pytest.fixture
def region() -> Iterator[np.ndarray]:
    num_bytes = NUM_SLOTS * LAYOUT.page_bytes
    memory = Region.create(num_bytes, 2 * num_bytes)
    yield np.frombuffer(memory.map(), np.uint8).reshape(NUM_SLOTS, LAYOUT.page_bytes)
    memory.close()


def wait(completion: Completion) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not completion.done():
        assert time.monotonic() < deadline
        time.sleep(0.0001)


@pytest.mark.parametrize("piece_bytes", [2**30, 5 * 2**18])
def test_pages_go_both_ways(region: np.ndarray, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.pagestore.client import cuda_copies

    # CUDA rejects copies across registered pieces, so none of these may cross one.
    monkeypatch.setattr(cuda_copies, "MAX_REGISTERED_BYTES", piece_bytes)
    pool = CudaKvPool(LAYOUT, NUM_PAGES, torch.device("cuda", 0))
    copies = cuda_copies.CudaRegionCopies(pool, region)
    pool.memory.random_(0, 256)
    torch.cuda.synchronize()
    before = pool.memory.cpu().numpy()
    slots = np.random.default_rng(1).permutation(NUM_SLOTS)[:NUM_PAGES].tolist()
    wait(copies.copy_out(range(NUM_PAGES), slots))
    assert (region[slots] == before).all()
    pool.memory.zero_()
    torch.cuda.synchronize()
    wait(copies.copy_in(slots, range(NUM_PAGES)))
    assert (pool.memory.cpu().numpy() == before).all()
    copies.close()


def test_copies_wait_for_no_forward_pass_and_start_at_once(region: np.ndarray) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.pagestore.client.cuda_copies import CudaRegionCopies

    pool = CudaKvPool(LAYOUT, NUM_PAGES, torch.device("cuda", 0))
    copies = CudaRegionCopies(pool, region)
    wait(copies.copy_out([0], [0]))
    torch.cuda._sleep(SLEEP_CYCLES)
    forward = torch.cuda.Event()
    forward.record()
    began = time.monotonic()
    ends = [copies.copy_in(range(NUM_PAGES), range(NUM_PAGES)), copies.copy_out(range(NUM_PAGES), range(NUM_PAGES))]
    assert time.monotonic() - began < MAX_START_S
    while not all(end.done() for end in ends):
        assert not forward.query()
        # Otherwise the copying threads wait for the interpreter's lock, 5 ms per batch.
        time.sleep(0.0001)
    # At least 1 GB/s.
    assert all(0 < end.seconds < NUM_PAGES * LAYOUT.page_bytes / 1e9 for end in ends)
    copies.close()
    torch.cuda.synchronize()


def test_close_waits_and_ends_the_registration(region: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.pagestore.client.cuda_copies import CudaRegionCopies

    pool = CudaKvPool(LAYOUT, NUM_PAGES, torch.device("cuda", 0))
    pool.memory.fill_(7)
    torch.cuda.synchronize()
    for _ in range(2):
        region[:] = 0
        # Registered memory cannot be registered again.
        with caplog.at_level(logging.INFO):
            copies = CudaRegionCopies(pool, region)
        end = copies.copy_out(range(NUM_PAGES), range(NUM_PAGES))
        copies.close()
        assert end.done() and (region[:NUM_PAGES] == 7).all()
    assert caplog.text.count("s per GiB") == 2


def test_refused_registration_leaves_no_error_and_no_registration(region: np.ndarray) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.pagestore.client.cuda_copies import CudaRegionCopies, RegisteredMemory

    pool = CudaKvPool(LAYOUT, NUM_PAGES, torch.device("cuda", 0))
    part = RegisteredMemory(region.ctypes.data, 2**20, LAYOUT.page_bytes)
    with pytest.raises(RuntimeError, match=r"registers only 0\.00 of .* GiB of the page store's region"):
        CudaRegionCopies(pool, region)
    # Kernels launched afterwards check for errors.
    pool.memory.fill_(3)
    torch.cuda.synchronize()
    part.close()
    copies = CudaRegionCopies(pool, region)
    wait(copies.copy_out([1], [2]))
    assert (region[2] == 3).all()
    copies.close()
