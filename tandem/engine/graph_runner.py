"""Decode steps as CUDA graphs: one launch for all kernels of a step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tandem.engine.attention.base import GraphableBackend, GraphedAttention
from tandem.engine.batch import Batch
from tandem.engine.models.base import Model

# A graph captured too early would hold the lazy set-up of kernels and libraries.
NUM_WARMUPS = 2


class _Graph(NamedTuple):
    """A captured step and the tensors that it reads and writes, which must live as long as it does.

    Attributes:
        input_ids: (batch_size,) int64.
        rows: (batch_size,) int64, those whose logits are wanted: all.
    """

    graph: torch.cuda.CUDAGraph
    attention: GraphedAttention
    input_ids: torch.Tensor
    rows: torch.Tensor


def graph_sizes(max_batch_size: int) -> list[int]:
    """Batch sizes that have a graph: small steps where a row counts, then multiples of 8, and the largest itself."""
    sizes = {1, 2, 4, *range(8, max_batch_size + 1, 8), max_batch_size}
    return sorted(size for size in sizes if size <= max_batch_size)


class DecodeGraphs:
    """A graph for each of graph_sizes; a batch runs in the smallest that it fits, padded."""

    def __init__(
        self,
        model: Model,
        attention: GraphableBackend,
        device: torch.device,
        max_batch_size: int,
        max_pages_per_sequence: int,
        on_progress: Callable[[str], None],
    ) -> None:
        self._model = model
        self._device = device
        self._graphs: dict[int, _Graph] = {}
        # What a step gives, one memory for all sizes: (max_batch_size, vocab_size) float32, (max_batch_size,) int64.
        self._logits = torch.empty(max_batch_size, model.config.vocab_size, device=device)
        self._token_ids = torch.empty(max_batch_size, dtype=torch.int64, device=device)
        pool: Any = None
        # The largest first: the smaller ones find room in what it has taken.
        sizes = list(reversed(graph_sizes(max_batch_size)))
        attentions = attention.for_graphs(sizes, max_pages_per_sequence)
        for number, size in enumerate(sizes, 1):
            on_progress(f"capturing CUDA graphs ({number} of {len(sizes)})")
            self._graphs[size] = self._capture(attentions[size], size, pool)
            pool = self._graphs[size].graph.pool()
        self._sizes = sorted(self._graphs)

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Runs a decode batch.

        Returns:
            logits (num_sequences, vocab_size) float32 and the most likely token ids (num_sequences,) int64, in memory
            that the next run overwrites; None if the batch is larger than every graph.
        """
        num_sequences = len(batch.sequences)
        size = next((size for size in self._sizes if size >= num_sequences), None)
        if size is None:
            return None
        graph = self._graphs[size]
        ids = [s.token_ids[s.cached_len] for s in batch.sequences] + [0] * (size - num_sequences)
        graph.input_ids.copy_(torch.tensor(ids, pin_memory=True), non_blocking=True)
        graph.attention.plan(batch.sequences)
        graph.graph.replay()
        return self._logits[:num_sequences], self._token_ids[:num_sequences]

    def _capture(self, attention: GraphedAttention, size: int, pool: Any) -> _Graph:
        input_ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        rows = torch.arange(size, device=self._device)
        # All padding: nobody's pages are touched.
        attention.plan(())

        def step() -> None:
            logits = self._model.forward(input_ids, attention.positions, attention, rows, out=self._logits[:size])
            torch.argmax(logits, dim=-1, out=self._token_ids[:size])

        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARMUPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return _Graph(graph, attention, input_ids, rows)
