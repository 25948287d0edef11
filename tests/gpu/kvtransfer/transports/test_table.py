import re

import pytest
import torch

from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.transports.base import Transport
from tandem.kvtransfer.transports.opening import load_transports
from tandem.kvtransfer.transports.table import TRANSPORTS
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.page_layout import OpaqueLayout

LAYOUT = OpaqueLayout(16, 4096)


@pytest.mark.parametrize("name", TRANSPORTS.for_device("cuda"))
def test_every_name_is_a_transport(name: str) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    pool = CudaKvPool(LAYOUT, 2, torch.device("cuda", 0))
    assert isinstance(load_transports([name], pool, "127.0.0.1", ClusterCredentials())[name], Transport)


@pytest.mark.parametrize("name", TRANSPORTS.names)
def test_unsupported_pool_is_refused(name: str) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    other = (
        CpuKvPool(LAYOUT, 2, "elsewhere")
        if name in TRANSPORTS.for_device("cuda")
        else CudaKvPool(LAYOUT, 2, torch.device("cuda", 0))
    )
    with pytest.raises(ValueError, match=f"transport {name} moves pages between pools"):
        load_transports([name], other, "127.0.0.1", ClusterCredentials())


def test_pools_of_one_gpu_name_the_same_gpu() -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    first, second = (CudaKvPool(LAYOUT, 2, torch.device("cuda", 0)) for _ in range(2))
    assert re.fullmatch(r"[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.0", first.gpu, re.IGNORECASE)
    assert first.gpu == second.gpu and not CpuKvPool(LAYOUT, 2, "named").gpu
