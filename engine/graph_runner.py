"""Decode steps as CUDA graphs: one launch for all kernels of a step."""

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
from tandem.engine.graph_capture import GraphCapture, shortest_s
from tandem.engine.layers.experts.counts import NUM_STAGED, staged_rows
from tandem.engine.models.base import Model
from tandem.engine.ranks.record import NO_GRAPH, GraphSize
from tandem.engine.upload import Packed, aligned


class _Graph(NamedTuple):
    """
    Attributes:
        staged: (aligned(8 * (2 * batch_size + NUM_STAGED)),) uint8, int64 numbers: the tokens known on the host, each
            row's index in the memory of tokens, and staged_rows.
    """

    graph: AdaptedGraph
    attention: GraphedAttention
    input_ids: torch.Tensor
    staged: torch.Tensor


class GraphOutput(NamedTuple):
    """Output of a graph, in memory that the next run overwrites.

    Attributes:
        logits: (num_rows, vocab_size) bfloat16.
        most_likely: (num_rows,) int64.
        newest_ids: the last computed token of each row, (num_rows,) int64; None if the host always knows all tokens.
    """

    logits: torch.Tensor
    most_likely: torch.Tensor
    newest_ids: torch.Tensor | None = None


def graph_sizes(max_batch_size: int) -> list[int]:
    """Returns the batch sizes with a graph: 1, 2, 4, multiples of 8, and the largest itself; none for 0."""
    sizes = {1, 2, 4, *range(8, max_batch_size + 1, 8), max_batch_size}
    return sorted(size for size in sizes if 0 < size <= max_batch_size)


class DecodeGraphs:
    """A graph for each of graph_sizes; a batch is padded to the next size."""

    def __init__(
        self,
        model: Model,
        attention: GraphableBackend,
        device: torch.device,
        max_batch_size: int,
        max_pages_per_sequence: int,
        on_progress: Callable[[str], None],
        slots: AdapterSlots | None = None,
    ) -> None:
        from tandem.engine.layers.most_likely import MostLikely

        self._model = model
        self._device = device
        self._slots = slots
        self._graphs: dict[int, _Graph] = {}
        # Shared by graphs of all sizes.
        self._logits = torch.empty(max_batch_size, model.config.vocab_size, dtype=model.dtype, device=device)
        self._most_likely = MostLikely(model.config.vocab_size, max_batch_size, device)
        # Sampled tokens, then staged numbers, int64. The next step gathers its tokens from both at once.
        self._max_batch_size = max_batch_size
        num_tokens = max_batch_size + _num_staged(max_batch_size)
        self._tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        sizes = list(reversed(graph_sizes(max_batch_size)))
        attentions = attention.for_graphs(sizes, max_pages_per_sequence)
        with GraphCapture(device) as capture:
            for number, size in enumerate(sizes, 1):
                on_progress(f"capturing CUDA graphs ({number} of {len(sizes)})")
                self._graphs[size] = self._capture(capture, attentions[size], size)
        self._sizes = sorted(self._graphs)

    def size_of(self, batch: Batch, num_fed: int) -> GraphSize:
        """Returns the size of the graph for a decode batch; NO_GRAPH if it, or the batch that feeds it, is larger than
        every graph. Args: num_fed: rows of the output that feeds it."""
        if num_fed > self._max_batch_size:
            return NO_GRAPH
        size = next((size for size in self._sizes if size >= len(batch.sequences)), 0)
        return GraphSize(size, 0)

    def run(self, batch: Batch, fed_ids: torch.Tensor | None) -> GraphOutput | None:
        """Runs a decode batch; returns None without a graph for it."""
        size, _ = self.size_of(batch, 0 if fed_ids is None else len(fed_ids))
        if not size:
            return None
        num_sequences = len(batch.sequences)
        graph = self._graphs[size]
        graph.attention.plan(batch.sequences)
        if fed_ids is not None and fed_ids.data_ptr() != self._tokens.data_ptr():
            # Sampled outside the graph.
            self._tokens[: len(fed_ids)].copy_(fed_ids)
        num_padding = size - num_sequences
        known_ids = batch.known_ids() + [0] * num_padding
        fed_rows = batch.fed_rows
        rows = [-1] * size if fed_rows is None else [*fed_rows, *[-1] * num_padding]
        index = [row if row >= 0 else self._max_batch_size + i for i, row in enumerate(rows)]
        counted = staged_rows(num_sequences, num_sequences)
        Packed(np.concatenate((np.array(known_ids + index, np.int64), counted))).copy_to(graph.staged)
        slots = None
        if batch.has_adapters:
            token_slots = batch.adapter_slots()
            slots = token_slots, token_slots
        graph.graph.replay(slots)
        return GraphOutput(self._logits[:num_sequences], self._tokens[:num_sequences], graph.input_ids[:num_sequences])

    def times_s(self, sizes: Sequence[int]) -> dict[int, float]:
        """Measures the device's time of those of the sizes that have a graph, of different tokens without a context.
        Experts count them, because rows that do not count choose none."""
        times_s = {}
        for size in self._sizes:
            if size not in sizes:
                continue
            graph = self._graphs[size]
            graph.attention.plan(())
            known_ids = np.arange(size, dtype=np.int64) % self._model.config.vocab_size
            index = np.arange(size, dtype=np.int64) + self._max_batch_size
            Packed(np.concatenate((known_ids, index, staged_rows(size, size)))).copy_to(graph.staged)
            times_s[size] = shortest_s(partial(graph.graph.replay, None))
        return times_s

    def _capture(self, capture: GraphCapture, attention: GraphedAttention, size: int) -> _Graph:
        input_ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        staged = self._tokens[self._max_batch_size : self._max_batch_size + _num_staged(size)]
        index, counted = staged[size : 2 * size], staged[2 * size : 2 * size + NUM_STAGED]
        # All rows are padding.
        attention.plan(())
        graphed = None if self._slots is None else self._slots.graphed(size, None)

        def step(model: Model, adapters: AdapterBatch | None) -> None:
            torch.index_select(self._tokens, 0, index, out=input_ids)
            with model.counting(counted):
                logits = model.forward(
                    input_ids, attention.positions, attention, None, out=self._logits[:size], adapters=adapters
                )
            if model.samples:
                self._most_likely.find(logits, self._tokens[:size])

        graph = AdaptedGraph(capture, step, self._model, graphed)
        return _Graph(graph, attention, input_ids, staged.view(torch.uint8))


def _num_staged(batch_size: int) -> int:
    return aligned(8 * (2 * batch_size + NUM_STAGED)) // 8
