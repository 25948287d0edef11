"""Decode steps with drafts as CUDA graphs."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.adapters.graphs import AdaptedGraph
from tandem.engine.adapters.ops import AdapterBatch
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.attention.base import GraphableBackend, GraphedAttention
from tandem.engine.batch import Batch
from tandem.engine.config import MAX_DRAFTED_ROWS
from tandem.engine.graph_capture import GraphCapture, shortest_s
from tandem.engine.graph_runner import GraphOutput
from tandem.engine.layers.experts.counts import NUM_STAGED, staged_rows
from tandem.engine.models.base import Model
from tandem.engine.ranks.record import NO_GRAPH, GraphSize
from tandem.engine.upload import Packed, aligned

# Of the sequences' tokens and drafts together.
SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MAX_DRAFTED_ROWS)
MAX_ROWS = SIZES[-1]


class _Graph(NamedTuple):
    """
    Attributes:
        staged: (aligned(8 * (num_rows + NUM_STAGED)),) uint8, int64 numbers: the tokens to compute, and staged_rows.
    """

    graph: AdaptedGraph
    attention: GraphedAttention
    staged: torch.Tensor


def draft_graph_sizes(max_batch_size: int, max_drafts: int) -> tuple[int, ...]:
    """Returns the SIZES that steps with drafts need; none without drafts."""
    largest = max_batch_size * (1 + max_drafts) if max_drafts else 0
    return SIZES[: bisect_left(SIZES, largest) + 1] if largest else ()


class DraftGraphs:
    """A graph for each number of rows; a step is padded to the next size.

    A row is a token or a draft. Attention takes any division of the rows among sequences, so graphs need no sizes of
    batches and drafts.
    """

    def __init__(
        self,
        model: Model,
        attention: GraphableBackend,
        device: torch.device,
        sizes: Sequence[int],
        max_pages_per_sequence: int,
        on_progress: Callable[[str], None],
        slots: AdapterSlots | None = None,
    ) -> None:
        from tandem.engine.layers.most_likely import MostLikely

        self._model = model
        self._device = device
        self._slots = slots
        self._sizes = sorted(sizes)
        largest = self._sizes[-1]
        self._graphs: dict[int, _Graph] = {}
        # Shared by graphs of all sizes.
        self._logits = torch.empty(largest, model.config.vocab_size, dtype=model.dtype, device=device)
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._most_likely = MostLikely(model.config.vocab_size, largest, device)
        attentions = attention.for_draft_graphs(self._sizes, max_pages_per_sequence)
        with GraphCapture(device) as capture:
            for number, size in enumerate(reversed(self._sizes), 1):
                on_progress(f"capturing graphs for drafts ({number} of {len(self._sizes)})")
                self._graphs[size] = self._capture(capture, attentions[size], size)

    def size_of(self, batch: Batch) -> GraphSize:
        """Returns the size of the graph for a decode batch with drafts; NO_GRAPH if it is larger than every graph."""
        index = bisect_left(self._sizes, batch.num_tokens)
        return GraphSize(self._sizes[index], 0) if index < len(self._sizes) else NO_GRAPH

    def run(self, batch: Batch) -> GraphOutput | None:
        """Runs a decode batch with drafts; returns None without a graph for it."""
        size, _ = self.size_of(batch)
        if not size:
            return None
        num_rows = batch.num_tokens
        graph = self._graphs[size]
        graph.attention.plan(batch.sequences)
        ids = np.array(batch.known_ids() + [0] * (size - num_rows), np.int64)
        Packed(np.concatenate((ids, staged_rows(num_rows, num_rows)))).copy_to(graph.staged)
        slots = None
        if batch.has_adapters:
            row_slots = batch.adapter_slots()
            slots = row_slots, row_slots
        graph.graph.replay(slots)
        return GraphOutput(self._logits[:num_rows], self._token_ids[:num_rows])

    def times_s(self) -> dict[int, float]:
        """Measures the device's time of each size, of different tokens without a context.
        Experts count them, because rows that do not count choose none."""
        times_s = {}
        for size in self._sizes:
            graph = self._graphs[size]
            graph.attention.plan(())
            ids = np.arange(size, dtype=np.int64) % self._model.config.vocab_size
            Packed(np.concatenate((ids, staged_rows(size, size)))).copy_to(graph.staged)
            times_s[size] = shortest_s(partial(graph.graph.replay, None))
        return times_s

    def _capture(self, capture: GraphCapture, attention: GraphedAttention, size: int) -> _Graph:
        num_staged = aligned(8 * (size + NUM_STAGED)) // 8
        staged = torch.zeros(num_staged, dtype=torch.int64, device=self._device)
        input_ids, counted = staged[: size + NUM_STAGED].split((size, NUM_STAGED))
        # All rows are padding.
        attention.plan(())
        graphed = None if self._slots is None else self._slots.graphed(size, None)

        def run(model: Model, adapters: AdapterBatch | None) -> None:
            with model.counting(counted):
                logits = model.forward(
                    input_ids, attention.positions, attention, None, out=self._logits[:size], adapters=adapters
                )
            if model.samples:
                self._most_likely.find(logits, self._token_ids[:size])

        graph = AdaptedGraph(capture, run, self._model, graphed)
        return _Graph(graph, attention, staged.view(torch.uint8))
