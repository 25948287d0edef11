"""Ranks build their engines together."""

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.collectives.base import Collectives
from tandem.engine.collectives.choice import open_collectives
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.models.base import Model
from tandem.engine.ranks.group import RankGroup

# Packages whose kernels compute. Equal versions choose equal ones.
KERNEL_PACKAGES = ("torch", "flashinfer-python", "triton")


@contextmanager
def opened(group: RankGroup, device: torch.device) -> Iterator[Collectives | None]:
    """Connects the ranks' devices, and releases the other ranks if this one fails."""
    collectives = open_collectives(group, device)
    try:
        yield collectives
    except BaseException:
        if collectives is not None:
            collectives.abort()
        raise


def check_equal(
    group: RankGroup, model: Model, pool: KvPool, attention: AttentionBackend, graph_sizes: object = None
) -> None:
    """Raises ValueError on every rank unless all compute in the same way.

    Args:
        graph_sizes: of all CUDA graphs; None: there are none.
    """
    for package in KERNEL_PACKAGES:
        group.check_equal(f"the version of {package}", _version(package))
    group.check_equal("the number of pages", pool.num_pages)
    group.check_equal("the page layout", pool.layout.whole.tag)
    group.check_equal("attention", type(attention).__name__)
    group.check_equal("collectives", type(model.collectives).__name__)
    group.check_equal("the sizes of CUDA graphs", graph_sizes)


def agreed_num_pages(group: RankGroup, choose: Callable[[], int]) -> int:
    """Returns the least number of pages of all ranks. Raises ValueError on every rank if one has too little memory."""
    num_pages, error = 0, ""
    try:
        num_pages = choose()
    except ValueError as too_little:
        error = str(too_little)
    for rank, message in enumerate(group.gathered(error)):
        if message:
            raise ValueError(message if group.ranks.degree == 1 else f"rank {rank}: {message}")
    return group.least(num_pages)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
