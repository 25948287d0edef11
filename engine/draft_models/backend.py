"""Attention of a target and its drafter over the same pages, and the states between them."""

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.attention.base import Attention, AttentionBackend
from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.attention.page_tables import Int64s, prefill_slots
from tandem.engine.attention.paged_rows import token_rows
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed

# Instead of a slot: the state is that of the row before, or zeros before a sequence's first token.
_ROW_BEFORE, _NONE = -1, -2


class PageStates:
    """States of tokens, kept in their pages for the rows behind them.

    They travel with a handover and stay with a cached prefix, as keys and values do.
    """

    def __init__(self, pool: KvPool, layout: DraftedLayout) -> None:
        assert layout.state_size
        begin = layout.states_offset
        region = pool.memory[:, begin : begin + layout.page_size * layout.state_bytes]
        states = region.view(getattr(torch, layout.dtype)).unflatten(1, (layout.page_size, layout.state_size))
        self._rows, self._rows_per_page = token_rows(states, layout.state_size)
        self._layout = layout
        self._device = pool.device
        # (num_tokens,) int64 each: where a token's state is written, and where the state before it is read.
        self._written = self._read = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: Batch) -> None:
        sequences = batch.sequences
        read = []
        for s in sequences:
            of_sequence = np.full(s.extend_len, _ROW_BEFORE)
            of_sequence[0] = self._slot_before(s)
            read.append(of_sequence)
        written = self._rows_of(prefill_slots(self._layout, sequences))
        self._written, self._read = Packed(written, np.concatenate(read)).to(self._device)

    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        """Keeps the states of the planned tokens, and returns those of the tokens before them.

        Args:
            states: (num_tokens, state_size).
        """
        kept = self._rows.index_select(0, self._read.clamp(min=0))
        before = torch.where((self._read >= 0)[:, None], kept, states.roll(1, 0))
        before.masked_fill_((self._read == _NONE)[:, None], 0)
        self._rows.index_copy_(0, self._written, states)
        return before

    def before(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """Returns the states before the next token of each sequence, (len(sequences), state_size)."""
        [read] = Packed(np.array([self._slot_before(s) for s in sequences])).to(self._device)
        return self._rows.index_select(0, read.clamp(min=0)).masked_fill_((read < 0)[:, None], 0)

    def _slot_before(self, s: TokenSequence) -> int:
        if not s.cached_len:
            return _NONE
        page, offset = divmod(s.cached_len - 1, self._layout.page_size)
        return s.page_ids[page] * self._rows_per_page + offset

    def _rows_of(self, slots: Int64s) -> Int64s:
        """Args: slots: page * page_size + offset in the page."""
        page_size = self._layout.page_size
        return slots // page_size * self._rows_per_page + slots % page_size


class DraftedAttention(Attention):
    """
    Attributes:
        states: None if the drafter reads none.
    """

    target: Attention
    drafter: Attention
    states: PageStates | None


class DraftedBackend(AttentionBackend, DraftedAttention):
    """Not chosen by name: it joins the backends chosen for the target and for the drafter."""

    layout = DraftedLayout
    reads = "pages with a drafter's layers"

    target: AttentionBackend
    drafter: AttentionBackend

    def __init__(self, target: AttentionBackend, drafter: AttentionBackend, states: PageStates | None) -> None:
        self.target = target
        self.drafter = drafter
        self.states = states
        self.computes_mixed = target.computes_mixed and drafter.computes_mixed

    def plan(self, batch: Batch) -> None:
        self.target.plan(batch)
        self.drafter.plan(batch)
        if self.states is not None:
            self.states.plan(batch)
