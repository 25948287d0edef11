"""Collectives between GPUs of one host that map each other's memory, and between ranks that share a GPU. Needs CUDA."""

from ctypes import c_void_p
from math import gcd

import torch

from tandem.engine.collectives.base import Collectives
from tandem.engine.collectives.ipc_memory import IpcMemory
from tandem.engine.collectives.nccl import NcclSums
from tandem.engine.layers.cuda_kernel import CudaKernel
from tandem.engine.ranks.config import MAX_DEGREE, RankConfig
from tandem.engine.ranks.group import RankGroup

THREADS = 512
VECTOR_BYTES = 16
MAX_BLOCKS = 64
STAGING_BYTES = 8 * 2**20
FLAG_BYTES = MAX_BLOCKS * MAX_DEGREE * 8
# A rank that compiles kernels at its start lets the others wait, in seconds.
START_TIMEOUT_S = 300.0
# Largest sums in one shot, by the largest degree: more ranks read more in one.
ONE_SHOT_BYTES = ((2, STAGING_BYTES), (4, 512 * 1024), (MAX_DEGREE, 256 * 1024))
# Largest sums by these kernels where NCCL can add, likewise. Measured on H200s with 2 and 4 ranks.
KERNEL_BYTES = ((2, 16 * 2**20), (MAX_DEGREE, 8 * 2**20))


class CudaIpcCollectives(Collectives):
    """Kernels that meet in memory mapped by all ranks (round.cuh).

    Each call is one kernel, or one for each STAGING_BYTES. Graphs may contain them. Outside graphs NCCL adds large
    tensors, if each rank has a GPU of its own. Tensors begin at multiples of 16 bytes.
    """

    def __init__(self, group: RankGroup, device: torch.device, nccl: NcclSums | None = None) -> None:
        """Every rank calls it. Raises ValueError, on every rank, if a GPU cannot map another's memory."""
        assert group.progress is not None
        self.ranks = group.ranks
        self._progress = group.progress
        self._device = device
        self._nccl = nccl
        self._timeout_ns = int(max(START_TIMEOUT_S, group.wait_timeout_s) * 1e9)
        self._memory = IpcMemory(group, FLAG_BYTES + 2 * STAGING_BYTES, device)
        # Rounds that have ended, and blocks that have ended the present one.
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        addresses = self._memory.addresses
        self._common = (
            *map(c_void_p, addresses),
            *[None] * (MAX_DEGREE - len(addresses)),
            self._state,
            c_void_p(self._memory.abort_address),
        )
        self._kernels: dict[tuple[object, ...], CudaKernel] = {}
        degree = self.ranks.degree
        self._one_shot_bytes = next(num_bytes for most, num_bytes in ONE_SHOT_BYTES if degree <= most)
        self._kernel_bytes = next(num_bytes for most, num_bytes in KERNEL_BYTES if degree <= most)
        # Zeros of all ranks are there before a kernel of any.
        torch.cuda.synchronize(device)
        group.gathered(None)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._add(x, None, x)

    def all_reduce_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Rounds once."""
        assert residual.shape == x.shape and residual.dtype is x.dtype
        return self._add(x, residual, residual)

    def gather_columns(
        self, part: torch.Tensor, num_columns: int, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        num_rows, num_held = part.shape
        assert num_held == len(self.ranks.vocabulary(num_columns))
        whole: torch.Tensor | None = None
        if self.ranks.is_leader:
            whole = part.new_empty(num_rows, num_columns) if out is None else out
            assert whole.shape == (num_rows, num_columns)
        share = len(RankConfig(0, self.ranks.degree).vocabulary(num_columns))
        step = STAGING_BYTES // (share * part.element_size())
        for begin in range(0, num_rows, step):
            received = None if whole is None else whole[begin : begin + step]
            self._exchange(part[begin : begin + step], received, share, num_columns, self.ranks.degree)
        return whole

    def broadcast(self, x: torch.Tensor) -> None:
        for part in x.view(-1).split(STAGING_BYTES // x.element_size()):
            row = part[None]
            sent, received = (row, None) if self.ranks.is_leader else (row[:, :0], row)
            self._exchange(sent, received, len(part), len(part), 1)

    def check(self) -> None:
        if self._progress.is_aborted:
            raise RuntimeError("the ranks' operations were aborted")

    def abort(self) -> None:
        self._progress.abort()
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.abort()
        self._memory.close()

    def _add(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """Writes the sum over all ranks, and of the residual, to out: x or the residual."""
        assert x.is_contiguous() and out.is_contiguous()
        num_bytes = x.numel() * x.element_size()
        if self._nccl is not None and num_bytes > self._kernel_bytes and not torch.cuda.is_current_stream_capturing():
            self._nccl.add(x)
            return x if residual is None else residual.add_(x)
        step = STAGING_BYTES // x.element_size()
        for begin in range(0, x.numel(), step):
            numbers, added, sums = (None if t is None else t.view(-1)[begin : begin + step] for t in (x, residual, out))
            assert numbers is not None
            num_part_bytes = len(numbers) * x.element_size()
            kernel = self._kernel(
                "all_reduce",
                BFLOAT16=x.dtype is torch.bfloat16,
                TWO_SHOT=num_part_bytes > self._one_shot_bytes,
            )
            grid = _grid(-(-num_part_bytes // VECTOR_BYTES))
            kernel.launch(grid, THREADS, *self._common, numbers, added, sums, len(numbers))
        return out

    def _exchange(
        self, sent: torch.Tensor, received: torch.Tensor | None, share: int, num_columns: int, num_senders: int
    ) -> None:
        """
        Args:
            sent: (num_rows, this rank's columns).
            received: (num_rows, num_columns), or None.
            share: columns of each sender but the last.
        """
        assert sent.is_contiguous() and (received is None or received.is_contiguous())
        size = sent.element_size()
        unit = gcd(VECTOR_BYTES, share * size, num_columns * size)
        kernel = self._kernel("exchange", UNIT_BYTES=unit)
        num_rows, num_held = sent.shape
        widths = (columns * size // unit for columns in (num_held, share, num_columns))
        part = sent if num_held else None
        grid = _grid(num_rows * share * size // unit)
        kernel.launch(grid, THREADS, *self._common, part, received, num_rows, *widths, num_senders)

    def _kernel(self, name: str, **macros: int) -> CudaKernel:
        key = name, *macros.values()
        kernel = self._kernels.get(key)
        if kernel is None:
            common = {
                "DEGREE": self.ranks.degree,
                "RANK": self.ranks.rank,
                "THREADS": THREADS,
                "MAX_BLOCKS": MAX_BLOCKS,
                "STAGING_BYTES": STAGING_BYTES,
                "TIMEOUT_NS": self._timeout_ns,
            }
            macros = {macro: int(value) for macro, value in macros.items()}
            kernel = self._kernels[key] = CudaKernel(__package__, name, common | macros, self._device)
        return kernel


def _grid(num_items: int) -> tuple[int, int]:
    """The same on all ranks, whose blocks of the same index meet. Args: num_items: one for each thread at least."""
    return min(MAX_BLOCKS, -(-num_items // THREADS)), 1
