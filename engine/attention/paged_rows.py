"""Places of tokens in a pool that is viewed as rows of one token in one layer."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.token_sequence import TokenSequence


class Queries(NamedTuple):
    """Places of a decode step's new tokens, if sequences have several, with all padded to the most.

    Attributes:
        tokens: (batch, num_queries) int64, indices of new tokens; padding repeats a sequence's last.
        places: (num_tokens,) int64, indices in the flattened `tokens`.
    """

    tokens: torch.Tensor
    places: torch.Tensor


class BatchRows(NamedTuple):
    """Rows of a decode step, padded to the longest sequence.

    Attributes:
        rows: (batch, kv_len) int64, layer 0's; padding repeats token 0.
        mask: (batch, num_queries, kv_len), added to scores: -inf for padding and for later tokens.
        written: (num_tokens,) int64, rows of the new tokens.
        queries: None if each sequence has one new token.
    """

    rows: torch.Tensor
    mask: torch.Tensor
    written: torch.Tensor
    queries: Queries | None

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (batch, num_queries, ...). Args: x: (num_tokens, ...)."""
        return x[:, None] if self.queries is None else x[self.queries.tokens]

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (num_tokens, ...). Args: x: (batch, num_queries, ...)."""
        return x[:, 0] if self.queries is None else x.flatten(0, 1)[self.queries.places]


def token_rows(pages: torch.Tensor, row_size: int) -> tuple[torch.Tensor, int]:
    """Views pages as rows of one token in one layer.

    Args:
        pages: any view of a pool's pages, or of a region of them, with whole rows between two pages.
        row_size: numbers of a row.

    Returns:
        (num_rows, row_size), and the rows from one page to the next. Rows between pages belong to other regions.
    """
    rows_per_page, rest = divmod(pages.stride(0), row_size)
    assert not rest and not pages.storage_offset() % row_size
    num_rows = (len(pages) - 1) * rows_per_page + pages[0].numel() // row_size
    return pages.as_strided((num_rows, row_size), (row_size, 1)), rows_per_page


class PagedRows:
    """Finds rows by page table, for gathers by row: these ignore unused slots, even NaN, and are as fast as gathers of
    whole pages."""

    def __init__(self, layout: PageLayout, rows_per_page: int, dtype: torch.dtype, device: torch.device) -> None:
        """Args: dtype: of masks; rows_per_page: as of `token_rows`. The first page_size are layer 0's."""
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
        mask = torch.zeros_like(rows, dtype=self._dtype).masked_fill_(~valid, float("-inf"))[:, None]
        if all(s.extend_len == 1 for s in sequences):
            return BatchRows(rows, mask, rows.gather(1, lengths - 1).flatten(), None)
        return self._with_drafts(sequences, rows, mask)

    def _with_drafts(self, sequences: Sequence[TokenSequence], rows: torch.Tensor, mask: torch.Tensor) -> BatchRows:
        num_new = [s.extend_len for s in sequences]
        num_queries = max(num_new)
        firsts = [0, *accumulate(num_new[:-1])]
        last = torch.tensor(num_new, device=self._device)[:, None] - 1  # (batch, 1)
        # Padding takes the place of the last new token.
        number = torch.arange(num_queries, device=self._device).minimum(last)  # (batch, num_queries)
        positions = number + torch.tensor([[s.cached_len] for s in sequences], device=self._device)
        is_later = torch.arange(rows.shape[1], device=self._device) > positions[..., None]
        places = [i * num_queries + j for i, num in enumerate(num_new) for j in range(num)]
        at = torch.tensor(places, device=self._device)
        queries = Queries(number + torch.tensor(firsts, device=self._device)[:, None], at)
        causal = mask.masked_fill(is_later, float("-inf"))
        return BatchRows(rows, causal, rows.gather(1, positions).flatten()[at], queries)

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
