"""Opens the collectives of a worker's ranks."""

import os
from pathlib import Path

import torch

from tandem.engine.collectives.base import Collectives
from tandem.engine.ranks.group import RankGroup


def open_collectives(group: RankGroup, device: torch.device) -> Collectives | None:
    """Connects the ranks. All call it; None: there is one rank.

    Raises:
        ValueError: on every rank, a GPU cannot map another's memory.
    """
    if group.ranks.degree == 1:
        return None
    if device.type == "cuda":
        return _on_gpus(group, device)
    return _on_cpus(group)


def _on_cpus(group: RankGroup) -> Collectives:
    from tandem.engine.collectives.gloo import GlooCollectives

    # A file without a name, which ends with the leader.
    store = os.memfd_create("tandem-ranks-store") if group.ranks.is_leader else None
    try:
        path = group.of_leader(f"/proc/{os.getpid()}/fd/{store}")
        collectives = GlooCollectives(group.ranks, Path(path), group.wait_timeout_s)
        # Until all are connected.
        group.gathered(None)
    finally:
        if store is not None:
            os.close(store)
    return collectives


def _on_gpus(group: RankGroup, device: torch.device) -> Collectives:
    from tandem.engine.collectives.cuda_ipc import CudaIpcCollectives
    from tandem.engine.collectives.nccl import NcclSums

    gpus = group.gathered(str(torch.cuda.get_device_properties(device).uuid))
    nccl = NcclSums(group, device) if len(set(gpus)) == len(gpus) else None
    return CudaIpcCollectives(group, device, nccl)
