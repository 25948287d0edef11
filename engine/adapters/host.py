"""Adapters in host memory, cut and laid out as this rank's slots are."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.engine.adapters.base import AdapterError
from tandem.engine.adapters.peft import ModuleTensors, PeftAdapter
from tandem.engine.models.linears import HeldProjections
from tandem.engine.weights.headers import TensorPlace

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Matrices(NamedTuple):
    """
    Attributes:
        a: (rank, in_size).
        b: (rank, out_size), with the scale.
    """

    rank: int
    a: torch.Tensor
    b: torch.Tensor


class HostAdapter(NamedTuple):
    """
    Attributes:
        parts: of each merged matrix, its projections; None: the adapter leaves one as it is.
        ranks: of each merged matrix, (num_projections,) int32; 0 where `parts` has None.
    """

    parts: Sequence[Sequence[Matrices | None]]
    ranks: Sequence[torch.Tensor]
    num_bytes: int


@torch.inference_mode()
def cut_adapter(adapter: PeftAdapter, held: Sequence[HeldProjections], dtype: torch.dtype) -> HostAdapter:
    """Returns this rank's part: rows of B for the outputs that it computes, columns of A for the inputs that it has.

    Raises AdapterError: a number is not finite, in this type and with the scale.
    """
    memory = _Memory(_num_numbers(adapter, held), dtype)
    parts, ranks = [], []
    for matrix in held:
        of_matrix = [
            None
            if (tensors := adapter.modules.get(module)) is None
            else _cut(adapter, module, tensors, rows, matrix.columns, memory)
            for module, rows in zip(matrix.modules, matrix.rows, strict=True)
        ]
        parts.append(of_matrix)
        ranks.append(torch.tensor([0 if part is None else part.rank for part in of_matrix], dtype=torch.int32))
    return HostAdapter(parts, ranks, memory.num_bytes)


def _cut(
    adapter: PeftAdapter, module: str, tensors: ModuleTensors, rows: range, columns: range, memory: "_Memory"
) -> Matrices:
    a, b = _tensor(adapter, tensors.a), _tensor(adapter, tensors.b)
    a = memory.take(a[:, columns.start : columns.stop])
    b = memory.take(b[rows.start : rows.stop].t().float() * tensors.scale)
    # Kernels multiply B of all adapters of a batch by every row, with zeros for others' rows: infinity would spread.
    if not (a.isfinite().all() and b.isfinite().all()):
        raise AdapterError(
            f"module {module} of adapter {adapter.info.path} has numbers that are not finite in {a.dtype}"
        )
    return Matrices(tensors.rank, a, b)


def _tensor(adapter: PeftAdapter, place: TensorPlace) -> torch.Tensor:
    # A copy, because data may begin anywhere.
    content = adapter.content[place.begin : place.end].copy()
    return torch.from_numpy(content).view(_DTYPES[place.dtype]).view(place.shape)


def _num_numbers(adapter: PeftAdapter, held: Sequence[HeldProjections]) -> int:
    return sum(
        adapter.modules[module].rank * (len(rows) + len(matrix.columns))
        for matrix in held
        for module, rows in zip(matrix.modules, matrix.rows, strict=True)
        if module in adapter.modules
    )


class _Memory:
    """One allocation for all matrices, which returns to the system whole.

    It is not pinned: torch keeps pinned memory, in sizes of powers of two.
    """

    def __init__(self, num_numbers: int, dtype: torch.dtype) -> None:
        self._numbers = torch.empty(num_numbers, dtype=dtype)
        self._num_taken = 0

    @property
    def num_bytes(self) -> int:
        return self._numbers.nbytes

    def take(self, matrix: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a matrix in this memory."""
        begin, self._num_taken = self._num_taken, self._num_taken + matrix.numel()
        return self._numbers[begin : self._num_taken].view(matrix.shape).copy_(matrix)
