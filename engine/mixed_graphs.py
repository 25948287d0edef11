"""Forwards that decode and compute prompts as CUDA graphs: launched kernel by kernel, one of few tokens takes the host
longer than the device."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.engine.attention.base import GraphableBackend, GraphedAttention
from tandem.engine.attention.mixed import graphed_by_kind
from tandem.engine.batch import Batch
from tandem.engine.graph_capture import GraphCapture
from tandem.engine.graph_runner import GraphOutput
from tandem.engine.mixed_sizes import NUM_DECODED, NUM_PROMPT_TOKENS
from tandem.engine.models.base import Model
from tandem.engine.prefill_graphs import MAX_PROMPTS
from tandem.engine.upload import Packed, aligned

# A launch kernel by kernel takes about so many times as long as that of prompts alone, so there are graphs of so many
# times as many tokens as the largest prefill graph has.
LAUNCH_FACTOR = 2


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """Of what numbers there are graphs: each of the one kind with each of the other.

    Attributes:
        num_decoded: sequences that are decoded, in order.
        num_prompt_tokens: likewise, tokens of prompts; none if and only if the others are none.
    """

    num_decoded: tuple[int, ...] = ()
    num_prompt_tokens: tuple[int, ...] = ()

    @classmethod
    def up_to(cls, max_decoded: int, max_prompt_tokens: int) -> "MixedSizes":
        """Those for steps of at most so many sequences and pieces of at most so many tokens; both are above 0."""
        num_decoded = (*(size for size in NUM_DECODED if size < max_decoded), max_decoded)
        return cls(num_decoded, NUM_PROMPT_TOKENS[: bisect_left(NUM_PROMPT_TOKENS, max_prompt_tokens) + 1])

    def pairs(self) -> list[tuple[int, int]]:
        """All of them, the largest first."""
        pairs = [(rows, tokens) for rows in self.num_decoded for tokens in self.num_prompt_tokens]
        return sorted(pairs, key=sum, reverse=True)

    def smallest(self, num_decoded: int, num_prompt_tokens: int, num_prompts: int = 1) -> tuple[int, int] | None:
        """The pair that so many are computed in; None if there is none."""
        if num_prompts > MAX_PROMPTS:
            return None
        row = bisect_left(self.num_decoded, num_decoded)
        column = bisect_left(self.num_prompt_tokens, num_prompt_tokens)
        if row == len(self.num_decoded) or column == len(self.num_prompt_tokens):
            return None
        return self.num_decoded[row], self.num_prompt_tokens[column]

    def num_unpadded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        """EngineBase.num_unpadded."""
        index = bisect_right(self.num_prompt_tokens, num_prompt_tokens)
        if index == 0 or self.smallest(num_decoded, num_prompt_tokens) is None:
            return num_prompt_tokens
        return self.num_prompt_tokens[index - 1]

    def num_padded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        """EngineBase.num_padded."""
        size = self.smallest(num_decoded, num_prompt_tokens)
        return num_prompt_tokens if size is None else size[1]


class _Graph(NamedTuple):
    """A captured forward and the tensors that it reads, which must live as long as it does.

    Attributes:
        decode, prefill: attention of either kind; graphs share them.
        input_ids: those of sequences that are decoded with their padding, then those of prompts with theirs; the graph
            itself gathers them.
    """

    graph: torch.cuda.CUDAGraph
    decode: GraphedAttention
    prefill: GraphedAttention
    input_ids: torch.Tensor


class MixedGraphs:
    """A graph for each pair of some sizes; a forward runs in the smallest that it fits, padded on both sides.

    Attributes:
        sizes: of which there are graphs: none where the backend has none of prefills.
    """

    def __init__(
        self,
        model: Model,
        attention: GraphableBackend,
        device: torch.device,
        sizes: MixedSizes,
        max_pages_per_sequence: int,
        on_progress: Callable[[str], None],
    ) -> None:
        """Args: attention: one that computes_mixed; sizes: not none."""
        # Imported here: a machine without CUDA has nothing to import.
        from tandem.engine.layers.most_likely import MostLikely

        prefills = attention.for_prefill_graphs(sizes.num_prompt_tokens, MAX_PROMPTS, max_pages_per_sequence)
        self.sizes = sizes if prefills else MixedSizes()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        if not prefills:
            return
        self._model = model
        self._shallow = model.shallow()
        self._device = device
        # What a forward gives has one memory for all sizes: a row for each sequence that is decoded and then one for
        # each prompt that ends, with nothing between them.
        self._max_decoded = sizes.num_decoded[-1]
        max_rows = self._max_decoded + MAX_PROMPTS
        self._logits = torch.empty(max_rows, model.config.vocab_size, dtype=model.dtype, device=device)
        self._newest_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._most_likely = MostLikely(model.config.vocab_size, max_rows, device)
        # The tokens that a forward gives, and behind them what the host stages, have one memory, of int64 numbers, so
        # that the next one gathers its tokens from both at once.
        max_tokens = self._max_decoded + sizes.num_prompt_tokens[-1]
        num_staged = aligned(8 * (2 * max_tokens + max_rows)) // 8
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

    def run(self, batch: Batch, fed_ids: torch.Tensor | None) -> GraphOutput | None:
        """Runs a mixed batch.

        Args:
            fed_ids: what the forward of the batch's feed has sampled for the sequences that it decoded, one each, int64
                on the device; None without a feed.

        Returns:
            A row for each sequence that needs logits; None if there is no graph for the batch, or the one that feeds it
            is larger than every graph.
        """
        num_decoded = len(batch.decoded)
        size = self.sizes.smallest(num_decoded, batch.num_tokens - num_decoded, len(batch.prompts))
        if size is None:
            return None
        if fed_ids is not None and len(fed_ids) > self._max_decoded:
            return None
        if batch.scores_prompts:
            return None
        graph = self._graphs[size]
        graph.decode.plan(batch.decoded)
        graph.prefill.plan(batch.prompts)
        if fed_ids is not None and fed_ids.data_ptr() != self._tokens.data_ptr():
            # These tokens were sampled outside these graphs.
            self._tokens[: len(fed_ids)].copy_(fed_ids)
        rows = batch.logits_rows()
        Packed(staged_numbers(batch, rows, *size, self._first_staged)).copy_to(self._staged)
        graph.graph.replay()
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
        staged = self._tokens[self._first_staged :]
        index, rows = staged[num_tokens : 2 * num_tokens], staged[2 * num_tokens : 2 * num_tokens + num_rows]
        config = self._model.config
        attention = graphed_by_kind(decode, prefill, config.num_q_heads * config.head_dim)
        # All tokens are padding: nobody's pages are touched.
        decode.plan(())
        prefill.plan(())

        def run(model: Model) -> None:
            torch.index_select(self._tokens, 0, index, out=input_ids)
            positions = torch.cat((decode.positions, prefill.positions))
            torch.index_select(input_ids, 0, rows, out=self._newest_ids[:num_rows])
            logits = model.forward(input_ids, positions, attention, rows, out=self._logits[:num_rows])
            self._most_likely.find(logits, self._tokens[:num_rows])

        graph = capture.capture(lambda: run(self._model), lambda: run(self._shallow))
        return _Graph(graph, decode, prefill, input_ids)


def staged_numbers(
    batch: Batch, logits_rows: list[int], num_decoded: int, num_prompt_tokens: int, first_staged: int
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """What the host tells a graph of a forward.

    Args:
        batch: a mixed one.
        logits_rows: of the batch.
        num_decoded, num_prompt_tokens: of the graph.
        first_staged: where in MixedGraphs' memory of tokens these numbers are going to be.

    Returns:
        Side by side, with num_tokens = num_decoded + num_prompt_tokens: tokens as known on the host, (num_tokens,); for
        each token where it is in the memory of tokens, (num_tokens,); and the rows of those whose logits are wanted,
        (num_decoded + MAX_PROMPTS,). Tokens and rows of padding are 0.
    """
    num_tokens = num_decoded + num_prompt_tokens
    numbers = np.zeros(2 * num_tokens + num_decoded + MAX_PROMPTS, np.int64)
    ids, index, rows = numbers[:num_tokens], numbers[num_tokens : 2 * num_tokens], numbers[2 * num_tokens :]
    num_known, known_ids = len(batch.decoded), batch.known_ids()
    ids[:num_known] = known_ids[:num_known]
    ids[num_decoded : num_decoded + len(known_ids) - num_known] = known_ids[num_known:]
    index[:] = np.arange(first_staged, first_staged + num_tokens)
    if batch.feed is not None:
        fed = np.array(batch.feed.rows)
        index[:num_known] = np.where(fed >= 0, fed, index[:num_known])
    wanted = rows[: len(logits_rows)]
    wanted[:] = logits_rows
    # Between the two kinds there is padding in the graph.
    wanted[wanted >= num_known] += num_decoded - num_known
    return numbers
