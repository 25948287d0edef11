from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.drafted_row import DraftedRow, SampledRow
from tandem.engine.output import Feed
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device

ForwardMode = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Work of one forward pass: the tokens of each sequence from cached_len to device_len.

    A decode batch has one token a sequence, and its drafts. A mixed batch has decoded sequences first, then prompts.

    Attributes:
        feed: None if the host knows all tokens.
    """

    mode: ForwardMode
    sequences: Sequence[TokenSequence]
    feed: Feed | None = None
    num_mixed: int = 0

    def __post_init__(self) -> None:
        assert self.sequences and all(s.extend_len > 0 for s in self.sequences)
        assert (self.mode == "mixed") == (0 < self.num_mixed < len(self.sequences))
        assert all(s.extend_len == 1 + len(s.draft_ids) for s in self.decoded)
        assert self.feed is None or len(self.feed.rows) == len(self.decoded)
        assert all(s.num_pending == (row >= 0) for s, row in zip(self.sequences, self._fed_rows(), strict=True))
        assert self.feed is None or not self.num_drafts

    @classmethod
    def of(
        cls, decoded: Sequence[TokenSequence], prompts: Sequence[TokenSequence], feed: Feed | None = None
    ) -> "Batch":
        if not prompts:
            return cls("decode", decoded, feed)
        if not decoded:
            return cls("prefill", prompts)
        return cls("mixed", [*decoded, *prompts], feed, len(decoded))

    @property
    def decoded(self) -> Sequence[TokenSequence]:
        return self.sequences if self.mode == "decode" else self.sequences[: self.num_mixed]

    @property
    def prompts(self) -> Sequence[TokenSequence]:
        return () if self.mode == "decode" else self.sequences[self.num_mixed :]

    @property
    def fed_rows(self) -> Sequence[int] | None:
        """Each decoded sequence's row of the feed, -1 where the host knows the token; None if it knows all."""
        return None if self.feed is None else self.feed.rows

    @property
    def waits_for_tokens(self) -> bool:
        """True if sampling must wait until the host knows all earlier tokens, because it computes the grammar masks.
        The forward pass runs meanwhile."""
        return any(s.constraint is not None and s.num_pending for s in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(s.extend_len for s in self.sequences)

    @property
    def num_drafts(self) -> int:
        return sum(len(s.draft_ids) for s in self.decoded)

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens to compute of decoded sequences, drafts included. They come first."""
        return len(self.decoded) + self.num_drafts

    @property
    def scores_prompts(self) -> bool:
        return any(s.sampling.num_prompt_logprobs is not None for s in self.prompts)

    @property
    def needs_hidden_states(self) -> bool:
        """True if logits do not suffice. Graphs return nothing else."""
        return self.scores_prompts or any(s.needs_embedding for s in self.prompts)

    def known_ids(self) -> list[int]:
        """Returns the (num_tokens,) tokens to compute; 0 for a fed token."""
        ids: list[int] = []
        for s in self.sequences:
            ids.extend([0] if s.num_pending else s.token_ids[s.cached_len : s.device_len])
            ids.extend(s.draft_ids)
        return ids

    def input_ids(self, device: torch.device, fed_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the tokens to compute: (num_tokens,) int64.

        Args:
            fed_ids: the feed's sampled tokens of decoded sequences, int64 on the device.
        """
        known_ids = self.known_ids()
        fed_rows = self.fed_rows
        if fed_rows is None:
            return to_device(known_ids, device)
        assert fed_ids is not None
        # Prompt tokens are many: gather only the decoded ones.
        num_decoded = len(fed_rows)
        index = [row if row >= 0 else len(fed_ids) + i for i, row in enumerate(fed_rows)]
        index += range(len(fed_ids) + num_decoded, len(fed_ids) + len(known_ids))
        staged = to_device(known_ids + index, device)
        return torch.cat((fed_ids, staged[: len(index)])).index_select(0, staged[len(index) :])

    def positions(self, device: torch.device) -> torch.Tensor:
        """(num_tokens,) int64."""
        positions = np.concatenate([np.arange(s.cached_len, s.device_len) for s in self.sequences])
        return to_device(positions, device)

    def logits_rows(self) -> list[int]:
        """Returns the rows of the last tokens, and of the drafts behind them."""
        rows: list[int] = []
        end = 0
        for s in self.sequences:
            end += s.extend_len
            if s.needs_logits:
                rows.extend(range(end - 1 - len(s.draft_ids), end))
        return rows

    def pooled_rows(self) -> list[int]:
        """Returns the rows of the last tokens of prompts to embed."""
        ends = accumulate(s.extend_len for s in self.sequences)
        return [end - 1 for end, s in zip(ends, self.sequences, strict=True) if s.needs_embedding]

    def sampled_rows(self) -> list[SampledRow]:
        """Returns what the sampler reads of each row of `logits_rows`."""
        rows: list[SampledRow] = []
        for s in self.sequences:
            if s.needs_logits:
                rows.append(s)
                rows.extend(DraftedRow(s, num_drafts) for num_drafts in range(1, len(s.draft_ids) + 1))
        return rows

    @property
    def has_adapters(self) -> bool:
        return any(s.adapter_slot != NO_ADAPTER for s in self.sequences)

    def adapter_slots(self) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """Returns the slot of each token's adapter, (num_tokens,); NO_ADAPTER for none."""
        slots = np.array([s.adapter_slot for s in self.sequences], np.int32)
        return np.repeat(slots, [s.extend_len for s in self.sequences])

    def _fed_rows(self) -> list[int]:
        rows = [*self.feed.rows] if self.feed else []
        return rows + [-1] * (len(self.sequences) - len(rows))

    def num_prompt_tokens(self) -> int:
        return sum(max(0, min(s.device_len, s.prompt_len) - s.cached_len) for s in self.sequences)
