"""Opens the collectives of a worker's ranks."""

import shutil
import tempfile
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
    from tandem.engine.collectives.gloo import GlooCollectives

    made = Path(tempfile.mkdtemp(prefix="tandem-ranks-")) if group.ranks.is_leader else None
    try:
        directory = group.of_leader(None if made is None else str(made))
        assert directory is not None
        collectives = GlooCollectives(group.ranks, Path(directory) / "store", group.wait_timeout_s)
        # The leader removes the file when all are connected.
        group.gathered(None)
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    return collectives


def _on_gpus(group: RankGroup, device: torch.device) -> Collectives:
    from tandem.engine.collectives.cuda_ipc import CudaIpcCollectives
    from tandem.engine.collectives.nccl import NcclSums

    gpus = group.gathered(str(torch.cuda.get_device_properties(device).uuid))
    nccl = NcclSums(group, device) if len(set(gpus)) == len(gpus) else None
    return CudaIpcCollectives(group, device, nccl)
