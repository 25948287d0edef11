"""Prefills as CUDA graphs: short ones, and large ones of small models. A host launches their kernels too slowly."""

import struct
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
# Besides the size of a whole chunk: of more prompts or more tokens.
_LARGE_SIZES = (512, 1024, MAX_TOKENS, 4096, 8192, 16384)
# Share of a size above MAX_TOKENS. A host that only launches graphs has time for scheduling, but padding takes the
# device's.
MAX_PADDING = 1 / 16


def large_graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """Returns the sizes of graphs of up to MAX_PREFILL_BATCH_SIZE prompts. Args: max_tokens: size of a whole chunk."""
    return tuple(sorted({*(size for size in _LARGE_SIZES if size < max_tokens), max_tokens}))


class _Graph(NamedTuple):
    """
    Attributes:
        staged: (aligned(8 * (num_tokens + max_prompts + NUM_STAGED)),) uint8, int64 numbers: the tokens to compute, the
            rows that need logits, and staged_rows.
    """

    graph: AdaptedGraph
    attention: GraphedAttention
    input_ids: torch.Tensor
    staged: torch.Tensor


class PrefillGraphs:
    """A graph for each size; a batch is padded to the next size.

    Sizes above MAX_TOKENS have one more, for prefills whose prompts all start in it: it reads no pages.
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
        max_prompts: int = MAX_PROMPTS,
    ) -> None:
        """
        Args:
            sizes: above MAX_TOKENS only if the backend has graphs_new_prompts.
            slots: of adapters; None: batches with adapters have no graph.
        """
        from tandem.engine.layers.most_likely import MostLikely

        self._model = model
        self._device = device
        self._slots = slots
        self._max_prompts = max_prompts
        # By size, and whether it reads no pages.
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._logits = torch.empty(max_prompts, model.config.vocab_size, dtype=model.dtype, device=device)
        self._token_ids = torch.zeros(max_prompts, dtype=torch.int64, device=device)
        self._most_likely = MostLikely(model.config.vocab_size, max_prompts, device)
        reading = attention.for_prefill_graphs(sizes, max_prompts, max_pages_per_sequence)
        attentions = {(size, False): of_size for size, of_size in reading.items()}
        if large := [size for size in sizes if size > MAX_TOKENS]:
            new = attention.for_new_prompt_graphs(large, max_prompts)
            attentions |= {(size, True): of_size for size, of_size in new.items()}
        with GraphCapture(device) as capture:
            for number, key in enumerate(sorted(attentions, reverse=True), 1):
                on_progress(f"capturing prefill graphs ({number} of {len(attentions)})")
                self._graphs[key] = self._capture(capture, attentions[key], key[0])
        self._sizes = sorted(reading)

    def fit(self, num_tokens: int) -> bool:
        return bool(self._sizes) and num_tokens <= self._sizes[-1]

    def size_of(self, batch: Batch, num_fed: int = 0) -> GraphSize:
        """Returns the size of the graph for a prefill; NO_GRAPH if none fits it."""
        index = bisect_left(self._sizes, batch.num_tokens)
        if index == len(self._sizes) or len(batch.sequences) > self._max_prompts or batch.needs_hidden_states:
            return NO_GRAPH
        size = self._sizes[index]
        if size > MAX_TOKENS and size - batch.num_tokens > MAX_PADDING * size:
            return NO_GRAPH
        if batch.has_adapters and self._slots is None:
            return NO_GRAPH
        return GraphSize(0, size)

    def run(self, batch: Batch) -> GraphOutput | None:
        _, size = self.size_of(batch)
        if not size:
            return None
        num_tokens = batch.num_tokens
        is_new = size > MAX_TOKENS and not any(s.cached_len for s in batch.sequences)
        graph = self._graphs[size, is_new]
        graph.attention.plan(batch.sequences)
        rows = batch.logits_rows()
        padding = [0] * (size - num_tokens)
        staged = [*batch.known_ids(), *padding, *rows, *[0] * (self._max_prompts - len(rows))]
        counted = staged_rows(num_tokens, len(rows))
        # A third of np.array's time.
        numbers = np.frombuffer(struct.pack(f"{len(staged)}q", *staged), np.int64)
        Packed(np.concatenate((numbers, counted))).copy_to(graph.staged)
        slots = None
        if batch.has_adapters:
            token_slots = batch.adapter_slots()
            slots = token_slots, token_slots[rows]
        graph.graph.replay(slots)
        return GraphOutput(self._logits[: len(rows)], self._token_ids[: len(rows)])

    def _capture(self, capture: GraphCapture, attention: GraphedAttention, size: int) -> _Graph:
        parts = size, self._max_prompts, NUM_STAGED
        staged = torch.zeros(aligned(8 * sum(parts)) // 8, dtype=torch.int64, device=self._device)
        input_ids, rows, counted = staged[: sum(parts)].split(parts)
        # All tokens are padding.
        attention.plan(())
        graphed = None if self._slots is None else self._slots.graphed(size, self._max_prompts)

        def run(model: Model, adapters: AdapterBatch | None) -> None:
            with model.counting(counted):
                logits = model.forward(
                    input_ids, attention.positions, attention, rows, out=self._logits, adapters=adapters
                )
            if model.samples:
                self._most_likely.find(logits, self._token_ids)

        graph = AdaptedGraph(capture, run, self._model, graphed)
        return _Graph(graph, attention, input_ids, staged.view(torch.uint8))
