import pytest

from tandem.engine.kvcache.pool import CpuKvPool
from tests.fakes.page_layout import OpaqueLayout


def test_oversized_pool_reports_sizes() -> None:
    with pytest.raises(ValueError, match=r"10000000 pages of 16777216 bytes needs \d+ MiB, but only \d+ MiB"):
        CpuKvPool(OpaqueLayout(16, 2**24), 10_000_000, "too-large")


def test_pages_are_zeroed_contiguous_and_not_shared() -> None:
    pool = CpuKvPool(OpaqueLayout(4, 192), 5, "contiguous")
    assert pool.memory.shape == (5, 192) and not pool.memory.any() and pool.device.type == "cpu"
    pool.memory[2] = 1
    assert pool.memory.is_contiguous()
    assert pool.memory.any(dim=1).tolist() == [False, False, True, False, False]
