import pytest

from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.transports.base import Transport
from tandem.kvtransfer.transports.opening import load_transports
from tandem.kvtransfer.transports.shared_memory import SharedMemory
from tandem.kvtransfer.transports.table import TRANSPORTS
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.page_layout import OpaqueLayout


# GPU transports: tests/gpu/kvtransfer/transports/test_table.py.
@pytest.mark.parametrize("name", TRANSPORTS.for_device("cpu"))
def test_every_name_is_a_transport(name: str) -> None:
    pool = CpuKvPool(OpaqueLayout(4, 64), 2, f"table-{name}")
    assert isinstance(load_transports([name], pool, "127.0.0.1", ClusterCredentials())[name], Transport)


class OwnTransport(SharedMemory):
    pass


def test_custom_transport_is_loaded_by_import_path() -> None:
    name = f"{__name__}:OwnTransport"
    pool = CpuKvPool(OpaqueLayout(4, 64), 2, "table-own")
    transports = load_transports(["tcp", name], pool, "127.0.0.1", ClusterCredentials())
    assert list(transports) == ["tcp", name]
    assert isinstance(transports[name], OwnTransport)
