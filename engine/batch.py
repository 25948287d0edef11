"""The sequences of one forward pass and their tokens as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from engine.output import Feed
from engine.token_sequence import TokenSequence
from engine.upload import to_device

ForwardMode = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward computes: for each sequence its tokens from cached_len to device_len.

    A decode batch has exactly one token a sequence.

    Attributes:
        feed: for decode; None if all tokens to compute are known.
    """

    mode: ForwardMode
    sequences: Sequence[TokenSequence]
    feed: Feed | None = None

    def __post_init__(self) -> None:
        assert self.sequences and all(s.extend_len > 0 for s in self.sequences)
        assert self.mode == "prefill" or all(s.extend_len == 1 for s in self.sequences)
        rows = self.feed.rows if self.feed else [-1] * len(self.sequences)
        # At most one token of a sequence is not known, and that one is fed.
        assert all(s.num_pending == (row >= 0) for s, row in zip(self.sequences, rows, strict=True))

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the next tokens can be chosen only when the host knows all tokens before them: what may come next by
        a grammar is found out there. The forward itself goes on meanwhile; ForwardOutput.sample chooses."""
        return any(s.constraint is not None and s.num_pending for s in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(s.extend_len for s in self.sequences)

    def known_ids(self) -> list[int]:
        """The tokens to compute, sequence after sequence: num_tokens of them, 0 for those that are fed."""
        ids: list[int] = []
        for s in self.sequences:
            ids.extend([0] if s.num_pending else s.token_ids[s.cached_len : s.device_len])
        return ids

    def input_ids(self, device: torch.device, fed_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens to compute, sequence after sequence: (num_tokens,) int64.

        Args:
            fed_ids: what the step of the feed has sampled, (its num_sequences,) int64 on the device.
        """
        known_ids = self.known_ids()
        if self.feed is None:
            return to_device(known_ids, device)
        assert fed_ids is not None
        index = [row if row >= 0 else len(fed_ids) + i for i, row in enumerate(self.feed.rows)]
        staged = to_device(known_ids + index, device)
        return torch.cat((fed_ids, staged[: len(index)])).index_select(0, staged[len(index) :])

    def positions(self, device: torch.device) -> torch.Tensor:
        """Their positions in their sequences: (num_tokens,) int64."""
        positions = np.concatenate([np.arange(s.cached_len, s.device_len) for s in self.sequences])
        return to_device(positions, device)

    def logits_rows(self) -> list[int]:
        """Rows of the token dimension whose logits are wanted: the last of each sequence with needs_logits."""
        rows: list[int] = []
        end = 0
        for s in self.sequences:
            end += s.extend_len
            if s.needs_logits:
                rows.append(end - 1)
        return rows

    def sampled_sequences(self) -> list[TokenSequence]:
        """The sequences of these rows, in the same order."""
        return [s for s in self.sequences if s.needs_logits]

    def num_prompt_tokens(self) -> int:
        """Tokens of this batch that belong to a client's prompt."""
        return sum(max(0, min(s.device_len, s.prompt_len) - s.cached_len) for s in self.sequences)
