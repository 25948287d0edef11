"""Attention of a target and its drafter over the same pages, and the states between them."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.attention.base import Attention, AttentionBackend
from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.attention.page_tables import Int64s
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed

# Instead of a place: the state is that of the row before, or zeros before a sequence's first token.
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
        begin = layout.states_offset
        region = pool.memory_and_dummy[:, begin : begin + layout.num_states * layout.state_bytes]
        # (num_pages, num_states, state_size).
        self._pages = region.view(getattr(torch, layout.dtype)).unflatten(1, (layout.num_states, layout.state_size))
        # int64 each: tokens whose state is written, the places for it, and for each token where the state before it is.
        self._kept = self._written = self._read = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: Batch) -> None:
        kept, written, read = self.places(batch.sequences)
        self._kept, self._written, self._read = Packed(kept, written, read).to(self.device)

    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        before = self.states_before(self._read, states)
        self.write(self._written, states.index_select(0, self._kept))
        return before

    def before(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """Returns the states before the next token of each sequence, (len(sequences), state_size)."""
        places = np.array([self._place_before(s) for s in sequences], np.int64)
        numbers = np.divmod(places.clip(0), self.layout.num_states)
        pages, in_page, absent = Packed(*numbers, np.flatnonzero(places == NO_STATE)).to(self.device)
        states = self._pages[pages, in_page]
        return states.index_fill_(0, absent, 0) if len(absent) else states

    def states_before(self, read: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Returns the states before a forward pass's tokens, (num_tokens, state_size).

        Args:
            read: (num_tokens,), as of `places`.
            states: of the tokens.
        """
        before = torch.where((read >= 0)[:, None], self._at(read), states.roll(1, 0))
        return before.masked_fill_((read == NO_STATE)[:, None], 0)

    def write(self, places: torch.Tensor, states: torch.Tensor) -> None:
        num_states = self.layout.num_states
        self._pages[places // num_states, places % num_states] = states

    def places(self, sequences: Sequence[TokenSequence]) -> tuple[Int64s, Int64s, Int64s]:
        """Returns the tokens whose state is kept, the places for them, and for each token where the state before it is:
        a place, ROW_BEFORE or NO_STATE.

        A place is page * num_states + number in the page.
        """
        page_size, num_states = self.layout.page_size, self.layout.num_states
        cached = np.array([s.cached_len for s in sequences], np.int64)
        ends = np.array([s.device_len for s in sequences], np.int64)
        # Pages of each sequence from the token before its new ones on.
        first_pages = np.maximum(cached - 1, 0) // page_size
        ids = array("i")
        starts = []
        for s, first_page in zip(sequences, first_pages.tolist(), strict=True):
            starts.append(len(ids))
            ids.extend(s.page_ids[first_page : self.layout.num_pages_for(s.device_len)])
        pages, page_starts = np.array(ids, np.int64), np.array(starts, np.int64) - first_pages
        num_new = ends - cached
        first_rows = num_new.cumsum() - num_new
        of_row = np.repeat(np.arange(len(sequences)), num_new)
        tokens = np.arange(len(of_row)) + (cached - first_rows)[of_row]
        # Later tokens of the page would overwrite those of others.
        behind = np.minimum((tokens // page_size + 1) * page_size, ends[of_row])
        kept = np.flatnonzero(tokens + num_states >= behind)
        last, of_last = tokens[kept], page_starts[of_row[kept]]
        written = pages[of_last + last // page_size] * num_states + last % page_size % num_states
        before = pages[page_starts + first_pages] * num_states + (cached - 1) % page_size % num_states
        read = np.full(len(tokens), ROW_BEFORE)
        read[first_rows] = np.where(cached > 0, before, NO_STATE)
        return kept, written, read

    def _at(self, places: torch.Tensor) -> torch.Tensor:
        places, num_states = places.clamp(min=0), self.layout.num_states
        return self._pages[places // num_states, places % num_states]

    def _place_before(self, s: TokenSequence) -> int:
        if not s.cached_len:
            return NO_STATE
        page, offset = divmod(s.cached_len - 1, self.layout.page_size)
        return s.page_ids[page] * self.layout.num_states + offset % self.layout.num_states


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
