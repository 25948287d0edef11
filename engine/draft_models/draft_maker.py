"""Drafts of an engine's sequences, one token after another, by the drafter alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tandem.engine.batch import Batch
from tandem.engine.draft_models.backend import DraftedBackend
from tandem.engine.draft_models.base import DraftModel
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.drafted_row import DraftedRow
from tandem.engine.sampler import sample
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device
from tandem.sampling_params import SamplingParams


class _Proposal(DraftedRow):
    """A sequence with the drafts so far. Tokens that a grammar allows are not known behind them."""

    def __init__(self, sequence: TokenSequence) -> None:
        super().__init__(sequence, 0)
        self.drafts: list[int] = []
        sampling = sequence.sampling
        has_logprobs = sampling.num_logprobs is not None
        self._sampling = replace(sampling, num_logprobs=None, logprob_token_ids=()) if has_logprobs else sampling

    def append(self, token_id: int) -> None:
        self.drafts.append(token_id)
        self.num_drafts += 1

    @property
    def sampling(self) -> SamplingParams:
        return self._sampling

    @property
    def allowed(self) -> "np.ndarray[Any, np.dtype[np.int32]] | None":
        return self.sequence.allowed

    @property
    def _drafts(self) -> list[int]:
        return self.drafts


class DraftMaker:
    """Samples drafts as the target's tokens are sampled, with the same parameters and random numbers.

    So a drafter whose logits equal the target's drafts the target's tokens, at any temperature. An even better choice
    for another drafter, its most likely token, would be accepted with that token's probability at most.
    """

    def __init__(self, model: DraftedModel, attention: DraftedBackend, device: torch.device) -> None:
        self._drafter: DraftModel = model.drafter
        self._attention = attention
        self._device = device

    @torch.inference_mode()
    def make(self, sequences: Sequence[TokenSequence], num_drafts: Sequence[int]) -> list[list[int]]:
        """Returns drafts behind the last token of each sequence. Waits for the device.

        Writes the drafter's pages from cached_len on, as a forward pass of the same tokens does.

        Args:
            sequences: between two forward passes, with one token that is not computed yet, known to the host, and pages
                for it and for the drafts.
            num_drafts: of each sequence.
        """
        rows = [_Proposal(sequence) for sequence in sequences]
        hidden: torch.Tensor | None = None
        computed: list[int] = []
        for depth in range(max(num_drafts)):
            going_on = [number for number, count in enumerate(num_drafts) if count > depth]
            states = None
            if self._attention.states is not None:
                if hidden is None:
                    states = self._attention.states.before([sequences[number] for number in going_on])
                else:
                    places = to_device([computed.index(number) for number in going_on], self._device)
                    states = self._drafter.next_states(hidden.index_select(0, places))
            newest = [(rows[number].drafts or sequences[number].token_ids)[-1] for number in going_on]
            batch = Batch.of([_behind(sequences[number], depth) for number in going_on], ())
            self._attention.drafter.plan(batch)
            hidden = self._drafter.run(
                to_device(newest, self._device), batch.positions(self._device), states, self._attention.drafter
            )
            computed = going_on
            drafted = sample(self._drafter.logits(hidden).float(), [rows[number] for number in going_on]).token_ids
            for number, token_id in zip(going_on, drafted.tolist(), strict=True):
                rows[number].append(token_id)
        return [row.drafts for row in rows]


def _behind(sequence: TokenSequence, num_drafts: int) -> TokenSequence:
    """Returns the row of one token behind `num_drafts` that are computed already, for a plan."""
    row = TokenSequence([], 0, sequence.page_ids, sequence.cached_len + num_drafts)
    row.device_len += 1
    return row
