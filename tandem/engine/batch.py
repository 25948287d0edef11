"""The sequences of one forward pass and their tokens as tensors."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import torch

from tandem.engine.request import Sequence

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward computes: for each sequence its tokens from cached_len to device_len.

    A decode batch has exactly one token a sequence.
    """

    phase: Phase
    sequences: SequenceOf[Sequence]

    def __post_init__(self) -> None:
        assert self.sequences and all(s.extend_len > 0 for s in self.sequences)
        assert self.phase == "prefill" or all(s.extend_len == 1 for s in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(s.extend_len for s in self.sequences)

    def input_ids(self, device: torch.device) -> torch.Tensor:
        """The tokens to compute, sequence after sequence: (num_tokens,) int64."""
        ids: list[int] = []
        for s in self.sequences:
            ids.extend(s.token_ids[s.cached_len : s.device_len])
        return torch.tensor(ids, dtype=torch.int64, device=device)

    def positions(self, device: torch.device) -> torch.Tensor:
        """Their positions in their sequences: (num_tokens,) int64."""
        positions: list[int] = []
        for s in self.sequences:
            positions.extend(range(s.cached_len, s.device_len))
        return torch.tensor(positions, dtype=torch.int64, device=device)

    def logits_rows(self) -> list[int]:
        """Rows of the token dimension whose logits are wanted: the last of each sequence with needs_logits."""
        rows: list[int] = []
        end = 0
        for s in self.sequences:
            end += s.extend_len
            if s.needs_logits:
                rows.append(end - 1)
        return rows

    def sampled_sequences(self) -> list[Sequence]:
        """The sequences of these rows, in the same order."""
        return [s for s in self.sequences if s.needs_logits]

    def num_prompt_tokens(self) -> int:
        """Tokens of this batch that belong to a client's prompt."""
        return sum(max(0, min(s.device_len, s.prompt_len) - s.cached_len) for s in self.sequences)
