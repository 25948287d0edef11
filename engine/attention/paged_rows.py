"""Places of tokens in a pool that is viewed as rows of one token in one layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.token_sequence import TokenSequence


class BatchRows(NamedTuple):
    """Rows of a decode step, padded to the longest sequence.

    Attributes:
        rows: (batch, kv_len) int64, layer 0's; padding repeats token 0.
        mask: (batch, kv_len), added to scores: -inf for padding.
        written: (batch,) int64, rows of the new tokens.
    """

    rows: torch.Tensor
    mask: torch.Tensor
    written: torch.Tensor


class PagedRows:
    """Finds rows by page table, for gathers by row: these ignore unused slots, even NaN, and are as fast as gathers of
    whole pages."""

    def __init__(self, layout: PageLayout, rows_per_page: int, dtype: torch.dtype, device: torch.device) -> None:
        """Args: dtype: of masks; rows_per_page: of all layers. The first page_size are layer 0's."""
        self._layout = layout
        self._rows_per_page = rows_per_page
        self._dtype = dtype
        self._device = device

    def of_sequence(self, sequence: TokenSequence) -> torch.Tensor:
        """Returns layer 0's rows, (device_len,) int64."""
        return self._of_pages(torch.tensor(self._pages(sequence), device=self._device))[: sequence.device_len]

    def of_batch(self, sequences: Sequence[TokenSequence]) -> BatchRows:
        tables = [self._pages(s) for s in sequences]
        num_pages = max(map(len, tables))
        padded = torch.tensor([table + table[:1] * (num_pages - len(table)) for table in tables], device=self._device)
        lengths = torch.tensor([[s.device_len] for s in sequences], device=self._device)  # (batch, 1)
        kv_len = max(s.device_len for s in sequences)
        rows = self._of_pages(padded)[:, :kv_len]
        valid = torch.arange(kv_len, device=self._device) < lengths  # (batch, kv_len)
        rows = torch.where(valid, rows, rows[:, :1])
        mask = torch.zeros_like(rows, dtype=self._dtype).masked_fill_(~valid, float("-inf"))
        return BatchRows(rows, mask, rows.gather(1, lengths - 1).flatten())

    def causal_mask(self, s: TokenSequence) -> torch.Tensor | None:
        """Returns (extend_len, device_len), added to scores: lower-right causal. None without a prefix: torch has that
        mask built in."""
        if s.cached_len == 0:
            return None
        shape = (s.extend_len, s.device_len)
        mask = torch.full(shape, float("-inf"), dtype=self._dtype, device=self._device)
        return mask.triu_(s.cached_len + 1)

    def _pages(self, sequence: TokenSequence) -> list[int]:
        """The page table may be longer than the tokens need."""
        num_pages = self._layout.num_pages_for(sequence.device_len)
        pages = list(sequence.page_ids[:num_pages])
        assert len(pages) == num_pages, f"{len(pages)} pages for {sequence.device_len} tokens"
        return pages

    def _of_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Maps (..., num_pages) int64 to (..., num_pages * page_size)."""
        first = pages * self._rows_per_page
        return (first[..., None] + torch.arange(self._layout.page_size, device=self._device)).flatten(-2)
