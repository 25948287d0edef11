"""FlashInfer's wrappers, planned from pinned memory. Needs CUDA."""

from collections.abc import Sequence
from typing import Any

import torch


class Wrapper:
    """The next plan waits for the copy of the previous one from pinned memory.

    Attributes:
        reads_pages: True if keys and values are read from pages. Otherwise they are read from qkv, in larger pieces,
            and all tokens of every sequence must be new.
    """

    def __init__(self, wrapper: Any, *, reads_pages: bool = True) -> None:
        self.reads_pages = reads_pages
        self._wrapper = wrapper
        self._copied = torch.cuda.Event()

    def plan(self, *tables: Any, **options: Any) -> None:
        self._copied.synchronize()
        self._wrapper.plan(*tables, **options)
        self._copied.record()

    def run(self, q: torch.Tensor, *kv: Any, out: torch.Tensor | None, **scales: float) -> torch.Tensor:
        # Without `out` the wrapper would zero its output first.
        heads = torch.empty_like(q) if out is None else out.view_as(q)
        attended: torch.Tensor = self._wrapper.run(q, *kv, out=heads, **scales)
        return attended.flatten(1)

    def run_with_log_sums(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, log_sums: torch.Tensor
    ) -> None:
        """Args: out: as q, overwritten; log_sums: (num_tokens, num_heads) float32, overwritten, in units of log 2."""
        self._wrapper.run(q, kv, out=out, lse=log_sums, return_lse=True)


def pinned(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)
