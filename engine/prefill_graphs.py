"""Short prefills as CUDA graphs: a device computes them faster than a host launches their kernels."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.adapters.graphs import AdaptedGraph
from tandem.engine.adapters.ops import AdapterBatch
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.attention.base import GraphableBackend, GraphedAttention
from tandem.engine.batch import Batch
from tandem.engine.graph_capture import GraphCapture
from tandem.engine.graph_runner import GraphOutput
from tandem.engine.layers.experts.counts import NUM_STAGED, staged_rows
from tandem.engine.models.base import Model
from tandem.engine.ranks.record import NO_GRAPH, GraphSize
from tandem.engine.upload import Packed, aligned

MAX_PROMPTS = 16
# Sizes are at most an eighth apart, except the smallest, because padding is computed too.
MAX_TOKENS = 2048
_STEPS = ((0, 128, 16), (128, 256, 32), (256, 512, 64), (512, 1024, 128), (1024, MAX_TOKENS, 256))
SIZES = tuple(size for start, end, step in _STEPS for size in range(start + step, end + 1, step))


class _Graph(NamedTuple):
    """
    Attributes:
        staged: (aligned(8 * (num_tokens + MAX_PROMPTS + NUM_STAGED)),) uint8, int64 numbers: the tokens to compute, the
            rows that need logits, and staged_rows.
    """

    graph: AdaptedGraph
    attention: GraphedAttention
    input_ids: torch.Tensor
    staged: torch.Tensor


class PrefillGraphs:
    """A graph for each size; a batch is padded to the next size."""

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
        self._graphs: dict[int, _Graph] = {}
        self._logits = torch.empty(MAX_PROMPTS, model.config.vocab_size, dtype=model.dtype, device=device)
        self._token_ids = torch.zeros(MAX_PROMPTS, dtype=torch.int64, device=device)
        self._most_likely = MostLikely(model.config.vocab_size, MAX_PROMPTS, device)
        attentions = attention.for_prefill_graphs(sizes, MAX_PROMPTS, max_pages_per_sequence)
        with GraphCapture(device) as capture:
            for number, size in enumerate(sorted(attentions, reverse=True), 1):
                on_progress(f"capturing prefill graphs ({number} of {len(attentions)})")
                self._graphs[size] = self._capture(capture, attentions[size], size)
        self._sizes = sorted(self._graphs)

    def fit(self, num_tokens: int) -> bool:
        return bool(self._sizes) and num_tokens <= self._sizes[-1]

    def size_of(self, batch: Batch, num_fed: int = 0) -> GraphSize:
        """Returns the size of the graph for a prefill; NO_GRAPH if none fits it."""
        index = bisect_left(self._sizes, batch.num_tokens)
        if index == len(self._sizes) or len(batch.sequences) > MAX_PROMPTS or batch.needs_hidden_states:
            return NO_GRAPH
        return GraphSize(0, self._sizes[index])

    def run(self, batch: Batch) -> GraphOutput | None:
        _, size = self.size_of(batch)
        if not size:
            return None
        num_tokens = batch.num_tokens
        graph = self._graphs[size]
        graph.attention.plan(batch.sequences)
        rows = batch.logits_rows()
        padding = [0] * (size - num_tokens)
        staged = [*batch.known_ids(), *padding, *rows, *[0] * (MAX_PROMPTS - len(rows))]
        counted = staged_rows(num_tokens, len(rows))
        Packed(np.concatenate((np.array(staged, np.int64), counted))).copy_to(graph.staged)
        slots = None
        if batch.has_adapters:
            token_slots = batch.adapter_slots()
            slots = token_slots, token_slots[rows]
        graph.graph.replay(slots)
        return GraphOutput(self._logits[: len(rows)], self._token_ids[: len(rows)])

    def _capture(self, capture: GraphCapture, attention: GraphedAttention, size: int) -> _Graph:
        num_staged = aligned(8 * (size + MAX_PROMPTS + NUM_STAGED)) // 8
        staged = torch.zeros(num_staged, dtype=torch.int64, device=self._device)
        input_ids, rows, counted = staged[: size + MAX_PROMPTS + NUM_STAGED].split((size, MAX_PROMPTS, NUM_STAGED))
        # All tokens are padding.
        attention.plan(())
        graphed = None if self._slots is None else self._slots.graphed(size, MAX_PROMPTS)

        def run(model: Model, adapters: AdapterBatch | None) -> None:
            with model.counting(counted):
                logits = model.forward(
                    input_ids, attention.positions, attention, rows, out=self._logits, adapters=adapters
                )
            if model.samples:
                self._most_likely.find(logits, self._token_ids)

        graph = AdaptedGraph(capture, run, self._model, graphed)
        return _Graph(graph, attention, input_ids, staged.view(torch.uint8))
