"""Passes of a drafter alone, between two forward passes of the target."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch
from tandem.engine.draft_models.base import DraftModel
from tandem.engine.drafted_row import SampledRow
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device


class PassOutput(NamedTuple):
    """
    Attributes:
        logits: (num_rows, vocab_size of the target), in memory that the next pass may overwrite.
        token_ids: (num_rows,) int64, drawn from them; None: they are to be drawn, and fed to the next pass.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor | None = None


class Passes(ABC):
    """One pass after another. Tokens and states stay on the device.

    Each pass computes one token of some sequences: those of the pass before, or the first ones of these.
    """

    @abstractmethod
    def begin(self, rows: Sequence[SampledRow], states: torch.Tensor | None) -> None:
        """Gives the first pass its tokens: the last one of each row.

        Args:
            rows: parameters of the draws.
            states: (len(rows), state_size) of the tokens before.
        """

    @abstractmethod
    def run(self, sequences: Sequence[TokenSequence]) -> PassOutput:
        """Launches a pass. Args: sequences: each with one token to compute; the host need not know it."""

    @abstractmethod
    def feed(self, token_ids: torch.Tensor) -> None:
        """Gives the next pass its tokens. Args: token_ids: (num_rows of the pass before,) int64 on the device."""


class LaunchedPasses(Passes):
    """Launches their kernels one by one."""

    def __init__(self, drafter: DraftModel, attention: AttentionBackend, device: torch.device) -> None:
        self._drafter = drafter
        self._attention = attention
        self._device = device
        self._token_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._states: torch.Tensor | None = None

    def begin(self, rows: Sequence[SampledRow], states: torch.Tensor | None) -> None:
        self._token_ids, self._states = to_device([row.token_ids[-1] for row in rows], self._device), states

    def run(self, sequences: Sequence[TokenSequence]) -> PassOutput:
        num_rows, batch = len(sequences), Batch.of(sequences, ())
        self._attention.plan(batch)
        states = None if self._states is None else self._states[:num_rows]
        positions = batch.positions(self._device)
        hidden = self._drafter.run(self._token_ids[:num_rows], positions, states, self._attention)
        if states is not None:
            self._states = self._drafter.next_states(hidden)
        return PassOutput(self._drafter.logits(hidden))

    def feed(self, token_ids: torch.Tensor) -> None:
        self._token_ids = token_ids
