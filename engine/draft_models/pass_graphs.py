"""Passes of a drafter alone as CUDA graphs."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tandem.engine.attention.base import GraphableBackend, GraphedAttention
from tandem.engine.draft_graphs import MAX_ROWS
from tandem.engine.draft_models.base import DraftModel
from tandem.engine.draft_models.pass_draws import MAX_PASSES, PassDraws, draws_whole
from tandem.engine.draft_models.passes import Passes, PassOutput
from tandem.engine.drafted_row import SampledRow
from tandem.engine.graph_capture import GraphCapture, shortest_s
from tandem.engine.token_sequence import TokenSequence

# Of sequences. A step with drafts has at least two rows of each sequence that has drafts.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, MAX_ROWS // 2)


class _Graph(NamedTuple):
    """A pass of some number of sequences.

    Attributes:
        layers: up to the logits and the next states.
        draws: of tokens, without and with filters. Filters take more kernels, in which
            unfiltered rows return at once.
    """

    layers: torch.cuda.CUDAGraph
    draws: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]
    attention: GraphedAttention

    def replay(self, has_filters: bool) -> None:
        self.layers.replay()
        self.draws[has_filters].replay()


def pass_graph_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Returns the SIZES that steps with drafts need."""
    return SIZES[: bisect_left(SIZES, min(max_batch_size, SIZES[-1])) + 1] if max_batch_size else ()


class PassGraphs(Passes):
    """A graph for each number of sequences; a pass is padded to the next size.

    The graphs of a pass read tokens and states, and write the drawn tokens and the next states in their place. So the host
    launches several passes in a row without waiting.
    """

    def __init__(
        self,
        drafter: DraftModel,
        attention: GraphableBackend,
        device: torch.device,
        sizes: Sequence[int],
        dtype: torch.dtype,
        max_pages_per_sequence: int,
        on_progress: Callable[[str], None],
    ) -> None:
        """Args: attention: of the drafter's pages; dtype: of states and logits."""
        self._drafter = drafter
        self._sizes = sorted(sizes)
        largest = self._sizes[-1]
        # All sizes read and write the first rows.
        self._draws = PassDraws(largest, device)
        self._draws_whole = False
        self._num_passes = 0
        self._states: torch.Tensor | None = None
        if drafter.state_size:
            self._states = torch.zeros(largest, drafter.state_size, dtype=dtype, device=device)
        self._logits = torch.empty(largest, drafter.config.vocab_size, dtype=dtype, device=device)
        self._graphs: dict[int, _Graph] = {}
        attentions = attention.for_graphs(self._sizes, max_pages_per_sequence)
        with GraphCapture(device) as capture:
            for number, size in enumerate(reversed(self._sizes), 1):
                on_progress(f"capturing the drafter's graphs ({number} of {len(self._sizes)})")
                self._graphs[size] = self._capture(capture, attentions[size], size)

    def fit(self, num_sequences: int) -> bool:
        return num_sequences <= self._sizes[-1]

    def begin(self, rows: Sequence[SampledRow], states: torch.Tensor | None) -> None:
        self._draws_whole = all(draws_whole(row) for row in rows)
        self._begin([row.token_ids[-1] for row in rows], rows if self._draws_whole else ())
        if self._states is not None:
            assert states is not None
            self._states[: len(states)].copy_(states)

    def run(self, sequences: Sequence[TokenSequence]) -> PassOutput:
        num_rows, number = len(sequences), self._num_passes
        assert number < MAX_PASSES
        graph = self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]]
        graph.attention.plan(sequences)
        graph.replay(self._draws.has_filters)
        self._num_passes += 1
        return PassOutput(self._logits[:num_rows], self._draws.drawn[number, :num_rows] if self._draws_whole else None)

    def feed(self, token_ids: torch.Tensor) -> None:
        self._draws.token_ids[: len(token_ids)].copy_(token_ids)

    def times_s(self) -> dict[int, float]:
        """Measures the device's time of each size, of different tokens without a context."""
        times_s = {}
        for size in self._sizes:
            graph = self._graphs[size]
            graph.attention.plan(())
            self._begin(range(size), ())
            times_s[size] = shortest_s(partial(graph.replay, False))
        return times_s

    def _begin(self, token_ids: Sequence[int], rows: Sequence[SampledRow]) -> None:
        self._draws.begin(token_ids, rows)
        self._num_passes = 0

    def _capture(self, capture: GraphCapture, attention: GraphedAttention, size: int) -> _Graph:
        drafter, token_ids = self._drafter, self._draws.token_ids[:size]
        states = None if self._states is None else self._states[:size]
        logits = self._logits[:size]
        # All rows are padding.
        attention.plan(())
        self._begin((), ())

        def run() -> None:
            hidden = drafter.run(token_ids, attention.positions, states, attention)
            drafter.logits(hidden, logits)
            if states is not None:
                states.copy_(drafter.next_states(hidden))

        def draw(has_filters: bool) -> None:
            self._draws.draw(logits, has_filters)

        layers = capture.capture(run, run)
        draws = []
        for has_filters in (False, True):
            # Passes are counted, trial ones too.
            self._begin((), ())
            draws.append(capture.capture(partial(draw, has_filters), partial(draw, has_filters)))
        return _Graph(layers, (draws[0], draws[1]), attention)
