"""Sums by NCCL, for tensors larger than a kernel of ours adds at once. Needs CUDA and cupy."""

import os
from typing import Any

import torch

from tandem.engine.ranks.group import RankGroup

# NCCL's numbers: cupy lacks bfloat16's.
_DTYPES = {torch.float32: 7, torch.bfloat16: 9}


class NcclSums:
    """Connects ranks that each have a GPU of their own: NCCL refuses two ranks of one."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        """Every rank calls it. Raises RuntimeError if NCCL cannot connect them."""
        # Read once in a process. Multicast needs rights that containers lack.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        from cupy.cuda import nccl

        self._sum = nccl.NCCL_SUM
        unique_id = group.of_leader(nccl.get_unique_id() if group.ranks.is_leader else None)
        with torch.cuda.device(device):
            self._communicator: Any = nccl.NcclCommunicator(group.ranks.degree, unique_id, group.ranks.rank)

    def add(self, x: torch.Tensor) -> None:
        """Replaces x by the sum over all ranks, in the current stream. All ranks get the same bits, because one rank
        adds a number and sends it to the others."""
        stream = torch.cuda.current_stream(x.device).cuda_stream
        self._communicator.allReduce(x.data_ptr(), x.data_ptr(), x.numel(), _DTYPES[x.dtype], self._sum, stream)

    def abort(self) -> None:
        """Ends sums that run. The communicator's destructor, in contrast, may wait for the other ranks."""
        self._communicator.abort()
