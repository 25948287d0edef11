import torch


def select_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns x[rows], or x itself if that is all of it. Args: rows: (n,) int64 on the device of x, ascending,
    distinct."""
    return x if len(rows) == len(x) else x.index_select(0, rows)


def replace_rows(x: torch.Tensor, rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Returns a copy of x with `by` in these rows, or `by` itself if they are all."""
    return by if len(rows) == len(x) else x.index_copy(0, rows, by)
