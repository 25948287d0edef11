"""Attention of a target and its drafter in CUDA graphs."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tandem.engine.attention.base import Attention, GraphableBackend, GraphedAttention
from tandem.engine.draft_models.backend import NO_STATE, DraftedAttention, DraftedBackend, PageStates, States
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed


class _GraphedStates(States):
    """Of a fixed number of tokens. Padding, and states that later tokens would overwrite, go to the dummy page."""

    def __init__(self, of_pages: PageStates, num_tokens: int, dummy_page: int) -> None:
        self._of_pages = of_pages
        self._num_tokens = num_tokens
        self._dummy_place = dummy_page * of_pages.layout.num_states
        packed = self._pack(())
        self._memory = torch.zeros(packed.num_bytes, dtype=torch.uint8, device=of_pages.device)
        written, read = packed.views(self._memory)
        self._written, self._read = written[:num_tokens], read[:num_tokens]

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._pack(sequences).copy_to(self._memory)

    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        before = self._of_pages.states_before(self._read, states)
        self._of_pages.write(self._written, states)
        return before

    def _pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        all_written = np.full(self._num_tokens, self._dummy_place, np.int64)
        all_read = np.full(self._num_tokens, NO_STATE, np.int64)
        if sequences:
            kept, written, read = self._of_pages.places(sequences)
            all_written[kept], all_read[: len(read)] = written, read
        return Packed(all_written, all_read)


class _JoinedStates(States):
    """Of a mixed step, decode rows first."""

    def __init__(self, decode: States, num_decoded: int, prefill: States) -> None:
        self._decode = decode
        self._num_decoded = num_decoded
        self._prefill = prefill

    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        decoded, prompts = states[: self._num_decoded], states[self._num_decoded :]
        return torch.cat((self._decode.exchange(decoded), self._prefill.exchange(prompts)))


class _JoinedDrafted(DraftedAttention):
    def __init__(self, target: Attention, drafter: Attention, states: States | None) -> None:
        self.target = target
        self.drafter = drafter
        self.states = states


class _GraphedDrafted(GraphedAttention, DraftedAttention):
    target: GraphedAttention
    drafter: GraphedAttention
    states: _GraphedStates | None

    def __init__(self, target: GraphedAttention, drafter: GraphedAttention, states: _GraphedStates | None) -> None:
        self.target = target
        self.drafter = drafter
        self.states = states
        self.positions = target.positions

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self.target.plan(sequences)
        self.drafter.plan(sequences)
        if self.states is not None:
            self.states.plan(sequences)


class GraphableDraftedBackend(DraftedBackend, GraphableBackend):
    """As DraftedBackend, of two backends for CUDA graphs."""

    target: GraphableBackend
    drafter: GraphableBackend

    def __init__(
        self, target: GraphableBackend, drafter: GraphableBackend, states: PageStates | None, dummy_page: int
    ) -> None:
        super().__init__(target, drafter, states)
        self._dummy_page = dummy_page

    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> Mapping[int, GraphedAttention]:
        return self._joined(
            self.target.for_graphs(batch_sizes, max_pages_per_sequence),
            self.drafter.for_graphs(batch_sizes, max_pages_per_sequence),
        )

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> Mapping[int, GraphedAttention]:
        return self._joined(
            self.target.for_draft_graphs(sizes, max_pages_per_sequence),
            self.drafter.for_draft_graphs(sizes, max_pages_per_sequence),
        )

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> Mapping[int, GraphedAttention]:
        targets = self.target.for_prefill_graphs(sizes, max_sequences, max_pages_per_sequence)
        drafters = self.drafter.for_prefill_graphs(sizes, max_sequences, max_pages_per_sequence)
        # One of them may have none.
        return self._joined({size: targets[size] for size in targets if size in drafters}, drafters)

    def joined(self, decode: GraphedAttention, prefill: GraphedAttention) -> Attention:
        assert isinstance(decode, _GraphedDrafted) and isinstance(prefill, _GraphedDrafted)
        states: States | None = None
        if decode.states is not None and prefill.states is not None:
            states = _JoinedStates(decode.states, len(decode.positions), prefill.states)
        return _JoinedDrafted(
            self.target.joined(decode.target, prefill.target),
            self.drafter.joined(decode.drafter, prefill.drafter),
            states,
        )

    def _joined(
        self, targets: Mapping[int, GraphedAttention], drafters: Mapping[int, GraphedAttention]
    ) -> Mapping[int, GraphedAttention]:
        return {
            size: _GraphedDrafted(target, drafters[size], self._graphed_states(size))
            for size, target in targets.items()
        }

    def _graphed_states(self, size: int) -> _GraphedStates | None:
        return None if self.states is None else _GraphedStates(self.states, size, self._dummy_page)
