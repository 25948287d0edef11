"""Attention of a target and its drafter over the same pages, and the states between them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.attention.base import Attention, AttentionBackend
from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.attention.page_tables import Int64s
from tandem.engine.attention.paged_rows import token_rows
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed

# Instead of a row: the state is that of the row before, or zeros before a sequence's first token.
ROW_BEFORE, NO_STATE = -1, -2


class States(ABC):
    """States of one planned forward pass's tokens, kept in their pages for the rows behind them."""

    @abstractmethod
    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        """Keeps the states of the planned tokens, and returns those of the tokens before them.

        Args:
            states: (num_tokens, state_size).
        """


class PageStates(States):
    """States in the pages of a pool.

    They travel with a handover and stay with a cached prefix, as keys and values do.
    """

    def __init__(self, pool: KvPool, layout: DraftedLayout) -> None:
        assert layout.state_size
        self.layout = layout
        self.device = pool.device
        self.rows, self._rows_per_page = _state_rows(pool.memory_and_dummy, layout)
        # int64 each: tokens whose state is written, the rows for it, and for each token where the state before it is.
        self._kept = self._written = self._read = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: Batch) -> None:
        kept, written, read = self.places(batch.sequences)
        self._kept, self._written, self._read = Packed(kept, written, read).to(self.device)

    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        before = states_before(self.rows, self._read, states)
        self.rows.index_copy_(0, self._written, states.index_select(0, self._kept))
        return before

    def before(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """Returns the states before the next token of each sequence, (len(sequences), state_size)."""
        [read] = Packed(np.array([self._row_before(s) for s in sequences])).to(self.device)
        return self.rows.index_select(0, read.clamp(min=0)).masked_fill_((read < 0)[:, None], 0)

    def places(self, sequences: Sequence[TokenSequence]) -> tuple[Int64s, Int64s, Int64s]:
        """Returns the tokens whose state is kept, the rows for them, and for each token where the state before it is: a
        row, ROW_BEFORE or NO_STATE."""
        page_size, num_states = self.layout.page_size, self.layout.num_states
        kept, written, read, num_before = [], [], [], 0
        for s in sequences:
            new = np.arange(s.cached_len, s.device_len)
            # Later tokens of the page would overwrite those of others.
            last = new[new + num_states >= np.minimum((new // page_size + 1) * page_size, s.device_len)]
            kept.append(last - s.cached_len + num_before)
            pages = np.asarray(s.page_ids[: self.layout.num_pages_for(s.device_len)], np.int64)
            written.append(pages[last // page_size] * self._rows_per_page + last % page_size % num_states)
            of_sequence = np.full(len(new), ROW_BEFORE)
            of_sequence[0] = self._row_before(s)
            read.append(of_sequence)
            num_before += len(new)
        return np.concatenate(kept), np.concatenate(written), np.concatenate(read)

    def first_row(self, page: int) -> int:
        return page * self._rows_per_page

    def _row_before(self, s: TokenSequence) -> int:
        if not s.cached_len:
            return NO_STATE
        page, offset = divmod(s.cached_len - 1, self.layout.page_size)
        return s.page_ids[page] * self._rows_per_page + offset % self.layout.num_states


def states_before(rows: torch.Tensor, read: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Returns the states before a forward pass's tokens, (num_tokens, state_size).

    Args:
        rows: (num_rows, state_size), in pages.
        read: (num_tokens,), as of PageStates.places.
        states: of the tokens.
    """
    kept = rows.index_select(0, read.clamp(min=0))
    before = torch.where((read >= 0)[:, None], kept, states.roll(1, 0))
    return before.masked_fill_((read == NO_STATE)[:, None], 0)


def _state_rows(memory: torch.Tensor, layout: DraftedLayout) -> tuple[torch.Tensor, int]:
    region = memory[:, layout.states_offset : layout.states_offset + layout.num_states * layout.state_bytes]
    states = region.view(getattr(torch, layout.dtype)).unflatten(1, (layout.num_states, layout.state_size))
    return token_rows(states, layout.state_size)


class DraftedAttention(Attention):
    """
    Attributes:
        states: None if the drafter reads none.
    """

    target: Attention
    drafter: Attention
    states: States | None


class DraftedBackend(AttentionBackend, DraftedAttention):
    """Not chosen by name: it joins the backends chosen for the target and for the drafter."""

    layout = DraftedLayout
    reads = "pages with a drafter's layers"

    target: AttentionBackend
    drafter: AttentionBackend
    states: PageStates | None

    def __init__(self, target: AttentionBackend, drafter: AttentionBackend, states: PageStates | None) -> None:
        self.target = target
        self.drafter = drafter
        self.states = states
        self.computes_mixed = target.computes_mixed and drafter.computes_mixed
        self.computes_drafts = target.computes_drafts and drafter.computes_drafts

    def plan(self, batch: Batch) -> None:
        self.target.plan(batch)
        self.drafter.plan(batch)
        if self.states is not None:
            self.states.plan(batch)
