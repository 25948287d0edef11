import pytest

from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.transports.shared_memory import (
    SharedMemoryReceiver,
    SharedMemorySender,
    decode_endpoint,
    encode_endpoint,
)
from tests.fakes.page_layout import OpaqueLayout

LAYOUT = OpaqueLayout(4, 512)


def test_whole_pages_are_copied_to_their_destinations() -> None:
    source, destination = CpuKvPool(LAYOUT, 4, "source"), CpuKvPool(LAYOUT, 6, "destination")
    for page in range(4):
        source.memory[page] = page + 1
    sender = SharedMemorySender(source, SharedMemoryReceiver(destination).endpoint())
    assert sender.copy_pages(0, [3, 0], [1, 5]).done()
    assert [float(destination.memory[page].float().mean()) for page in range(6)] == [0, 4, 0, 0, 0, 1]
    assert sender.abort().done()


def test_mismatched_pool_is_refused() -> None:
    source, destination = CpuKvPool(LAYOUT, 4, "here"), CpuKvPool(LAYOUT, 4, "there")
    file = destination.file
    with pytest.raises(ValueError, match="not the pool another-life"):
        SharedMemorySender(source, encode_endpoint(file._replace(name="another-life")))
    with pytest.raises(ValueError, match="does not consist of pages"):
        SharedMemorySender(source, encode_endpoint(file._replace(num_bytes=file.num_bytes + 1)))
    destination.close()
    with pytest.raises(ValueError, match=r"cannot be opened|not the pool"):
        SharedMemorySender(source, encode_endpoint(file))


def test_endpoint_is_decoded_or_refused() -> None:
    file = CpuKvPool(LAYOUT, 4, "told").file
    assert decode_endpoint(encode_endpoint(file)) == file
    for endpoint in (b"", b"scripted", encode_endpoint(file)[:16] + b"\xff"):
        with pytest.raises(ValueError, match="not a shared memory endpoint"):
            decode_endpoint(endpoint)
