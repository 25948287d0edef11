import numpy as np

from tandem.pagestore.client.populate import CHUNK_BYTES, populated
from tandem.pagestore.region import Region


def test_each_piece_has_memory_when_it_comes() -> None:
    piece = CHUNK_BYTES + 8192
    region = Region.create(2 * piece + 4096, 2**40)
    mapped = np.frombuffer(region.map(), np.uint8)
    came = []
    for start, size in populated(mapped.ctypes.data, region.num_bytes, piece):
        came.append((start, size))
        assert region.num_bytes - region.num_untouched_bytes >= start + size
    assert came == [(0, piece), (piece, piece), (2 * piece, 4096)]
    assert region.num_untouched_bytes == 0 and not mapped.any()
    region.close()


def test_a_caller_that_gives_up_leaves_the_rest_untouched() -> None:
    piece = CHUNK_BYTES
    region = Region.create(64 * piece, 2**40)
    mapped = np.frombuffer(region.map(), np.uint8)
    for _ in populated(mapped.ctypes.data, region.num_bytes, piece):
        break
    assert region.num_untouched_bytes > 0
    region.close()
