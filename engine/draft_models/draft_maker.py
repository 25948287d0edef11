"""Drafts of an engine's sequences, one token after another, by the drafter alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tandem.engine.draft_models.backend import DraftedBackend
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.draft_models.passes import LaunchedPasses, Passes, PassOutput
from tandem.engine.drafted_row import DraftedRow
from tandem.engine.sampler import sample
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.draft_models.pass_graphs import PassGraphs


class _Proposal(DraftedRow):
    """A sequence with its drafts so far, which the device alone knows. So tokens that a grammar allows behind them are
    not known."""

    def __init__(self, sequence: TokenSequence) -> None:
        super().__init__(sequence, 0)
        sampling = sequence.sampling
        has_logprobs = sampling.num_logprobs is not None
        self._sampling = replace(sampling, num_logprobs=None, logprob_token_ids=()) if has_logprobs else sampling
        self._row = TokenSequence([], 0, sequence.page_ids, sequence.cached_len)

    @property
    def sampling(self) -> SamplingParams:
        return self._sampling

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids

    @property
    def num_pending(self) -> int:
        return self.num_drafts

    @property
    def allowed(self) -> "np.ndarray[Any, np.dtype[np.int32]] | None":
        return self.sequence.allowed

    def known_ids(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        return self.sequence.known_ids()

    def behind(self) -> TokenSequence:
        """Returns the row of one token behind the drafts that are computed already, for a plan."""
        row = self._row
        row.cached_len = self.sequence.cached_len + self.num_drafts
        row.device_len = row.cached_len + 1
        return row


class DraftMaker:
    """Samples drafts as the target's tokens are sampled, with the same parameters and random numbers.

    So a drafter whose logits equal the target's drafts the target's tokens, at any temperature. An even better choice
    for another drafter, its most likely token, would be accepted with that token's probability at most.
    """

    def __init__(
        self, model: DraftedModel, attention: DraftedBackend, device: torch.device, graphs: "PassGraphs | None" = None
    ) -> None:
        self._attention = attention
        self._graphs = graphs
        self._launched = LaunchedPasses(model.drafter, attention.drafter, device)

    @torch.inference_mode()
    def make(self, sequences: Sequence[TokenSequence], num_drafts: Sequence[int]) -> list[list[int]]:
        """Returns drafts behind the last token of each sequence. Waits for the device, once.

        Writes the drafter's pages from cached_len on, as a forward pass of the same tokens does.

        Args:
            sequences: between two forward passes, with one token that is not computed yet, known to the host, and pages
                for it and for the drafts.
            num_drafts: of each sequence; at least one of them has some.
        """
        # Each pass computes the first rows of the pass before.
        order = sorted(range(len(sequences)), key=lambda number: -num_drafts[number])
        rows = [_Proposal(sequences[number]) for number in order]
        passes: Passes = self._launched
        if self._graphs is not None and self._graphs.fit(len(rows)):
            passes = self._graphs
        states = None
        if self._attention.states is not None:
            states = self._attention.states.before([row.sequence for row in rows])
        passes.begin(rows, states)
        drafted: list[torch.Tensor] = []
        for depth in range(num_drafts[order[0]]):
            going_on = rows[: sum(count > depth for count in num_drafts)]
            output = passes.run([row.behind() for row in going_on])
            drafted.append(self._choose(passes, output, going_on, drafted))
            for row in going_on:
                row.num_drafts += 1
        token_ids = iter(torch.cat(drafted).tolist())
        drafts: list[list[int]] = [[] for _ in rows]
        for of_pass in drafted:
            for place in range(len(of_pass)):
                drafts[order[place]].append(next(token_ids))
        return drafts

    def _choose(
        self, passes: Passes, output: PassOutput, rows: Sequence[_Proposal], drafted: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Returns the next draft of each row, (len(rows),) on the device, which the next pass reads."""
        if output.token_ids is not None:
            return output.token_ids
        pending = None
        if drafted and any(row.sampling.has_penalties for row in rows):
            pending = torch.stack([token_ids[: len(rows)] for token_ids in drafted], dim=1)
        token_ids = sample(output.logits.float(), rows, pending).token_ids
        passes.feed(token_ids)
        return token_ids
