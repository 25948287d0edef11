"""Mixed steps as CUDA graphs: a small step takes longer to launch than to compute."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.graphs import AdaptedGraph
from tandem.engine.adapters.ops import AdapterBatch
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.attention.base import GraphableBackend, GraphedAttention
from tandem.engine.batch import Batch
from tandem.engine.graph_capture import GraphCapture
from tandem.engine.graph_runner import GraphOutput
from tandem.engine.layers.experts.counts import NUM_STAGED, staged_rows
from tandem.engine.mixed_sizes import NUM_DECODED, prompt_sizes
from tandem.engine.models.base import Model
from tandem.engine.prefill_graphs import MAX_PROMPTS
from tandem.engine.ranks.record import NO_GRAPH, GraphSize
from tandem.engine.upload import Packed, aligned

# Launch time of a mixed step relative to a prefill.
LAUNCH_FACTOR = 2


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """
    Attributes:
        by_decoded: numbers of decoded sequences, ascending, and the numbers of prompt tokens beside each, ascending.
    """

    by_decoded: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def grid(cls, num_decoded: Iterable[int], num_prompt_tokens: Sequence[int]) -> "MixedSizes":
        """Returns all pairs."""
        return cls(tuple((size, tuple(num_prompt_tokens)) for size in num_decoded))

    @classmethod
    def up_to(cls, max_decoded: int, max_prompt_tokens: int) -> "MixedSizes":
        num_decoded = (*(size for size in NUM_DECODED if size < max_decoded), max_decoded)
        return cls(tuple((size, prompt_sizes(size, max_prompt_tokens)) for size in num_decoded))

    @property
    def num_decoded(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.by_decoded)

    @property
    def num_prompt_tokens(self) -> tuple[int, ...]:
        return tuple(sorted({size for _, sizes in self.by_decoded for size in sizes}))

    def pairs(self) -> list[tuple[int, int]]:
        pairs = [(rows, tokens) for rows, sizes in self.by_decoded for tokens in sizes]
        return sorted(pairs, key=sum, reverse=True)

    def smallest(self, num_decoded: int, num_prompt_tokens: int, num_prompts: int = 1) -> tuple[int, int] | None:
        if num_prompts > MAX_PROMPTS:
            return None
        rows, sizes = self._beside(num_decoded)
        column = bisect_left(sizes, num_prompt_tokens)
        return (rows, sizes[column]) if column < len(sizes) else None

    def num_unpadded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        _, sizes = self._beside(num_decoded)
        index = bisect_right(sizes, num_prompt_tokens)
        if index == 0 or self.smallest(num_decoded, num_prompt_tokens) is None:
            return num_prompt_tokens
        return sizes[index - 1]

    def num_padded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        size = self.smallest(num_decoded, num_prompt_tokens)
        return num_prompt_tokens if size is None else size[1]

    def _beside(self, num_decoded: int) -> tuple[int, tuple[int, ...]]:
        """Returns the least size of at least `num_decoded`, and its numbers of prompt tokens: none if all are less."""
        return next((of_size for of_size in self.by_decoded if of_size[0] >= num_decoded), (0, ()))


class _Graph(NamedTuple):
    """
    Attributes:
        input_ids: decoded tokens with padding, then prompt tokens with padding.
    """

    graph: AdaptedGraph
    decode: GraphedAttention
    prefill: GraphedAttention
    input_ids: torch.Tensor


class MixedGraphs:
    """A graph for each pair of sizes; a batch is padded on both sides."""

    def __init__(
        self,
        model: Model,
        attention: GraphableBackend,
        device: torch.device,
        sizes: MixedSizes,
        max_pages_per_sequence: int,
        on_progress: Callable[[str], None],
        slots: AdapterSlots | None = None,
    ) -> None:
        from tandem.engine.layers.most_likely import MostLikely

        prefills = attention.for_prefill_graphs(sizes.num_prompt_tokens, MAX_PROMPTS, max_pages_per_sequence)
        self.sizes = sizes if prefills else MixedSizes()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        if not prefills:
            return
        self._model = model
        self._backend = attention
        self._device = device
        self._slots = slots
        # Shared by graphs of all sizes: a row for each decoded sequence, then one for each prompt that ends, without
        # gaps.
        self._max_decoded = sizes.num_decoded[-1]
        max_rows = self._max_decoded + MAX_PROMPTS
        self._logits = torch.empty(max_rows, model.config.vocab_size, dtype=model.dtype, device=device)
        self._newest_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._most_likely = MostLikely(model.config.vocab_size, max_rows, device)
        # Sampled tokens, then staged numbers, int64. The next forward pass gathers its tokens from both at once.
        max_tokens = self._max_decoded + sizes.num_prompt_tokens[-1]
        num_staged = aligned(8 * (2 * max_tokens + max_rows + NUM_STAGED)) // 8
        self._tokens = torch.zeros(max_rows + num_staged, dtype=torch.int64, device=device)
        self._first_staged = max_rows
        self._staged = self._tokens[max_rows:].view(torch.uint8)
        decodes = attention.for_graphs(sizes.num_decoded, max_pages_per_sequence)
        pairs = sizes.pairs()
        with GraphCapture(device) as capture:
            for number, (num_decoded, num_prompt_tokens) in enumerate(pairs, 1):
                on_progress(f"capturing mixed graphs ({number} of {len(pairs)})")
                self._graphs[num_decoded, num_prompt_tokens] = self._capture(
                    capture, decodes[num_decoded], prefills[num_prompt_tokens], num_decoded, num_prompt_tokens
                )

    def size_of(self, batch: Batch, num_fed: int) -> GraphSize:
        """Returns the sizes of the graph for a mixed batch; NO_GRAPH if none fits it, or the batch that feeds it.
        Args: num_fed: rows of the output that feeds it."""
        num_decoded = len(batch.decoded)
        size = self.sizes.smallest(num_decoded, batch.num_tokens - num_decoded, len(batch.prompts))
        if size is None or num_fed > self._max_decoded or batch.needs_hidden_states:
            return NO_GRAPH
        return GraphSize(*size)

    def run(self, batch: Batch, fed_ids: torch.Tensor | None) -> GraphOutput | None:
        """Runs a mixed batch; returns None without a graph for it."""
        size = self.size_of(batch, 0 if fed_ids is None else len(fed_ids))
        if size == NO_GRAPH:
            return None
        graph = self._graphs[size]
        graph.decode.plan(batch.decoded)
        graph.prefill.plan(batch.prompts)
        if fed_ids is not None and fed_ids.data_ptr() != self._tokens.data_ptr():
            # Sampled outside these graphs.
            self._tokens[: len(fed_ids)].copy_(fed_ids)
        rows = batch.logits_rows()
        Packed(staged_numbers(batch, rows, *size, self._first_staged)).copy_to(self._staged)
        slots = None
        if batch.has_adapters:
            token_slots = batch.adapter_slots()
            slots = padded_slots(token_slots, len(batch.decoded), size[0]), token_slots[rows]
        graph.graph.replay(slots)
        return GraphOutput(self._logits[: len(rows)], self._tokens[: len(rows)], self._newest_ids[: len(rows)])

    def _capture(
        self,
        capture: GraphCapture,
        decode: GraphedAttention,
        prefill: GraphedAttention,
        num_decoded: int,
        num_prompt_tokens: int,
    ) -> _Graph:
        num_tokens, num_rows = num_decoded + num_prompt_tokens, num_decoded + MAX_PROMPTS
        input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        parts = (num_tokens, num_tokens, num_rows, NUM_STAGED)
        _, index, rows, counted = self._tokens[self._first_staged :][: sum(parts)].split(parts)
        attention = self._backend.joined(decode, prefill)
        # All tokens are padding.
        decode.plan(())
        prefill.plan(())
        graphed = None if self._slots is None else self._slots.graphed(num_tokens, num_rows)

        def run(model: Model, adapters: AdapterBatch | None) -> None:
            torch.index_select(self._tokens, 0, index, out=input_ids)
            positions = torch.cat((decode.positions, prefill.positions))
            torch.index_select(input_ids, 0, rows, out=self._newest_ids[:num_rows])
            with model.counting(counted):
                logits = model.forward(
                    input_ids, positions, attention, rows, out=self._logits[:num_rows], adapters=adapters
                )
            if model.samples:
                self._most_likely.find(logits, self._tokens[:num_rows])

        graph = AdaptedGraph(capture, run, self._model, graphed)
        return _Graph(graph, decode, prefill, input_ids)


def padded_slots(
    token_slots: "np.ndarray[Any, np.dtype[np.int32]]", num_known: int, num_decoded: int
) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Returns the slots of a graph's tokens, up to the last one that counts. Args: num_known: decoded tokens before the
    padding; num_decoded: of the graph."""
    padding = np.full(num_decoded - num_known, NO_ADAPTER, np.int32)
    return np.concatenate((token_slots[:num_known], padding, token_slots[num_known:]))


def staged_numbers(
    batch: Batch, logits_rows: list[int], num_decoded: int, num_prompt_tokens: int, first_staged: int
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Returns the host's inputs to a graph.

    Args:
        num_decoded, num_prompt_tokens: of the graph.
        first_staged: index of the result in the memory of tokens.

    Returns:
        Concatenated, with num_tokens = num_decoded + num_prompt_tokens: tokens known on the host, (num_tokens,); each
        token's index in the memory of tokens, (num_tokens,); rows that need logits, (num_decoded + MAX_PROMPTS,);
        staged_rows. Padding is 0.
    """
    num_tokens, num_rows = num_decoded + num_prompt_tokens, num_decoded + MAX_PROMPTS
    numbers = np.zeros(2 * num_tokens + num_rows + NUM_STAGED, np.int64)
    ids, index, rows, counted = np.split(numbers, (num_tokens, 2 * num_tokens, 2 * num_tokens + num_rows))
    num_known, known_ids = len(batch.decoded), batch.known_ids()
    ids[:num_known] = known_ids[:num_known]
    ids[num_decoded : num_decoded + len(known_ids) - num_known] = known_ids[num_known:]
    index[:] = np.arange(first_staged, first_staged + num_tokens)
    if (fed_rows := batch.fed_rows) is not None:
        fed = np.array(fed_rows)
        index[:num_known] = np.where(fed >= 0, fed, index[:num_known])
    wanted = rows[: len(logits_rows)]
    wanted[:] = logits_rows
    # The graph has padding between the two kinds.
    wanted[wanted >= num_known] += num_decoded - num_known
    later = range(num_decoded, num_decoded + len(known_ids) - num_known)
    counted[:] = staged_rows(num_known, len(logits_rows), later)
    return numbers
