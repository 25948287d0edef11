"""Numbers for some rows of a step, on their way to the device, and those rows out of all of the step's."""

import numpy as np
import torch


def upload(device: torch.device, *columns: np.ndarray) -> list[torch.Tensor]:
    """All columns in one copy that nobody waits for: to a GPU it comes from pinned memory, which torch keeps until it
    is over.

    Args:
        columns: int64 or float64 each, of one dimension.

    Returns:
        Tensors of the same lengths and types, views of one piece of memory.
    """
    packed = torch.empty(sum(map(len, columns)), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([column.view(np.int64) for column in columns], out=packed.numpy())
    parts = packed.to(device, non_blocking=True).split([len(column) for column in columns])
    return [
        part.view(torch.float64) if column.dtype == np.float64 else part
        for part, column in zip(parts, columns, strict=True)
    ]


def select_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows], or x itself if that is all of it.

    Args:
        rows: (n,) int64 on the device of x, in order, each once.
    """
    return x if len(rows) == len(x) else x.index_select(0, rows)


def replace_rows(x: torch.Tensor, rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """A copy of x with `by` in these rows, or `by` itself if they are all.

    Args:
        rows: (n,) int64 on the device of x, in order, each once.
    """
    return by if len(rows) == len(x) else x.index_copy(0, rows, by)
