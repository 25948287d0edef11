import mmap
import os

import pytest

from tandem.pagestore.region import GIB, Region


def test_all_mappings_share_one_memory_that_outlives_the_descriptor() -> None:
    region = Region.create(3 * mmap.PAGESIZE, GIB)
    first, second = region.map(), region.map()
    assert region.num_bytes == len(first) == 3 * mmap.PAGESIZE
    assert region.num_untouched_bytes == 3 * mmap.PAGESIZE
    second[0] = 1
    assert region.num_untouched_bytes == 2 * mmap.PAGESIZE
    region.close()
    first[mmap.PAGESIZE : mmap.PAGESIZE + 4] = b"page"
    assert second[mmap.PAGESIZE : mmap.PAGESIZE + 4] == b"page"
    # A second call must not close another file's descriptor.
    region.close()


def test_nobody_can_change_the_size() -> None:
    region = Region.create(mmap.PAGESIZE, GIB)
    for num_bytes in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fileno(), num_bytes)
    assert os.fstat(region.fileno()).st_mode & 0o777 == 0o600
    region.close()


def test_a_region_beyond_the_free_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^store_memory is 2\.00 GiB, but only 1\.50 GiB of memory are free: use a"):
        Region.create(2 * GIB, 3 * GIB // 2)
