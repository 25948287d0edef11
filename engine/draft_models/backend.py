"""Attention of a target and its drafter over the same pages, and the states between them."""

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.attention.base import Attention, AttentionBackend
from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.attention.paged_rows import token_rows
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed

# Instead of a row: the state is that of the row before, or zeros before a sequence's first token.
_ROW_BEFORE, _NONE = -1, -2


class PageStates:
    """States of tokens, kept in their pages for the rows behind them.

    They travel with a handover and stay with a cached prefix, as keys and values do.
    """

    def __init__(self, pool: KvPool, layout: DraftedLayout) -> None:
        assert layout.state_size
        begin = layout.states_offset
        region = pool.memory[:, begin : begin + layout.num_states * layout.state_bytes]
        states = region.view(getattr(torch, layout.dtype)).unflatten(1, (layout.num_states, layout.state_size))
        self._rows, self._rows_per_page = token_rows(states, layout.state_size)
        self._layout = layout
        self._device = pool.device
        # int64 each: tokens whose state is written, the rows for it, and for each token where the state before it is.
        self._kept = self._written = self._read = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: Batch) -> None:
        page_size, num_states = self._layout.page_size, self._layout.num_states
        read, kept, written, num_before = [], [], [], 0
        for s in batch.sequences:
            of_sequence = np.full(s.extend_len, _ROW_BEFORE)
            of_sequence[0] = self._row_before(s)
            read.append(of_sequence)
            new = np.arange(s.cached_len, s.device_len)
            # Later tokens of the page would overwrite those of others.
            last = new[new + num_states >= np.minimum((new // page_size + 1) * page_size, s.device_len)]
            kept.append(last - s.cached_len + num_before)
            pages = np.asarray(s.page_ids[: self._layout.num_pages_for(s.device_len)], np.int64)
            written.append(pages[last // page_size] * self._rows_per_page + last % page_size % num_states)
            num_before += s.extend_len
        arrays = [np.concatenate(numbers) for numbers in (kept, written, read)]
        self._kept, self._written, self._read = Packed(*arrays).to(self._device)

    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        """Keeps the states of the planned tokens, and returns those of the tokens before them.

        Args:
            states: (num_tokens, state_size).
        """
        kept = self._rows.index_select(0, self._read.clamp(min=0))
        before = torch.where((self._read >= 0)[:, None], kept, states.roll(1, 0))
        before.masked_fill_((self._read == _NONE)[:, None], 0)
        self._rows.index_copy_(0, self._written, states.index_select(0, self._kept))
        return before

    def before(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """Returns the states before the next token of each sequence, (len(sequences), state_size)."""
        [read] = Packed(np.array([self._row_before(s) for s in sequences])).to(self._device)
        return self._rows.index_select(0, read.clamp(min=0)).masked_fill_((read < 0)[:, None], 0)

    def _row_before(self, s: TokenSequence) -> int:
        if not s.cached_len:
            return _NONE
        page, offset = divmod(s.cached_len - 1, self._layout.page_size)
        return s.page_ids[page] * self._rows_per_page + offset % self._layout.num_states


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
