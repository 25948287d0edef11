"""Log probabilities of prompt tokens, computed with the prompt, because the cache keeps no logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.engine.batch import Batch
from tandem.engine.config import MAX_PREFILL_BATCH_SIZE
from tandem.engine.logprobs import most_likely
from tandem.engine.models.base import Model
from tandem.engine.upload import Packed, to_device
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import ALL_LOGPROBS

# As many as for the first tokens of a full batch.
MAX_SLICE_ROWS = MAX_PREFILL_BATCH_SIZE
# Sorting whole rows takes several times the logits' memory.
MAX_SORTED_ROWS = 8


class _Span(NamedTuple):
    number: int
    start: int
    num_tokens: int
    num_top: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Log probabilities of several prompts, on their way to the host like SampledLogprobs.

    Attributes:
        chosen: (num_tokens,) float32, of the prompts' own tokens.
        ranks: (num_tokens,) int32.
        top_ids: (num_tokens, k) int32, k at least every num_top, the most likely first.
        top: (num_tokens, k) float32, of top_ids.
    """

    spans: Sequence[_Span]
    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def packed(self) -> Iterator[tuple[int, PackedLogprobs]]:
        """Yields each sequence's number in the batch and its log probabilities."""
        columns = [t.numpy() for t in (self.chosen, self.ranks, self.top_ids, self.top)]
        begin = 0
        for span in self.spans:
            chosen, ranks, top_ids, top = (column[begin : begin + span.num_tokens] for column in columns)
            begin += span.num_tokens
            num_top = min(span.num_top, top.shape[1])
            yield (
                span.number,
                PackedLogprobs(
                    span.start,
                    num_top,
                    chosen.tobytes(),
                    ranks.tobytes(),
                    top_ids[:, :num_top].tobytes(),
                    top[:, :num_top].tobytes(),
                ),
            )


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """Log probabilities of one forward pass, on their way to the host."""

    parts: Sequence[_Part]

    def to_sequences(self, num_sequences: int) -> list[PackedLogprobs | None]:
        """Call once the copies have arrived."""
        found: list[PackedLogprobs | None] = [None] * num_sequences
        for part in self.parts:
            for number, packed in part.packed():
                found[number] = packed
        return found


class ScoredRows(NamedTuple):
    """Rows of a batch that need logits for log probabilities of prompts.

    Attributes:
        rows: ascending.
        step: rows at a time.
    """

    rows: "np.ndarray[Any, np.dtype[np.int64]]"
    step: int


def scored_rows(batch: Batch, vocab_size: int) -> list[ScoredRows]:
    """Returns the rows whose logits `score_prompts` computes, in its order."""
    return [asked.scored(vocab_size) for asked in _asked(batch, vocab_size)]


def logits_of_scored(model: Model, hidden: torch.Tensor, scored: Sequence[ScoredRows]) -> None:
    """Takes a follower's part in the logits that the leader scores."""
    for rows, step in scored:
        for start in range(0, len(rows), step):
            model.logits(hidden[to_device(rows[start : start + step], hidden.device)])


def score_prompts(model: Model, hidden: torch.Tensor, batch: Batch) -> ScoredPrompts | None:
    """Computes the log softmax of the model's own logits for prompt tokens behind a computed one.

    Args:
        hidden: (batch.num_tokens, hidden_size), output of the last layer.
    """
    parts = [_part(model, hidden, asked) for asked in _asked(batch, model.config.vocab_size)]
    return ScoredPrompts(parts) if parts else None


class _Asked(NamedTuple):
    spans: list[_Span]
    rows: list[np.ndarray]
    targets: list[int]

    def num_top(self, vocab_size: int) -> int:
        return min(max(span.num_top for span in self.spans), vocab_size)

    def scored(self, vocab_size: int) -> ScoredRows:
        is_sorted = self.num_top(vocab_size) == vocab_size
        return ScoredRows(np.concatenate(self.rows), MAX_SORTED_ROWS if is_sorted else MAX_SLICE_ROWS)


def _asked(batch: Batch, vocab_size: int) -> list[_Asked]:
    # Apart, because each part has as many columns as its largest number of alternatives.
    few, whole = _Asked([], [], []), _Asked([], [], [])
    end = 0
    for number, sequence in enumerate(batch.sequences):
        first_row, end = end, end + sequence.extend_len
        num_top = sequence.sampling.num_prompt_logprobs
        # The token behind the prompt's last is sampled.
        num_tokens = min(sequence.device_len, sequence.prompt_len - 1) - sequence.cached_len
        if num_top is None or num_tokens <= 0:
            continue
        start = sequence.cached_len + 1
        asked = whole if num_top == ALL_LOGPROBS else few
        asked.spans.append(_Span(number, start, num_tokens, vocab_size if num_top == ALL_LOGPROBS else num_top))
        asked.rows.append(np.arange(first_row, first_row + num_tokens))
        asked.targets.extend(sequence.token_ids[start : start + num_tokens])
    return [asked for asked in (few, whole) if asked.spans]


def _part(model: Model, hidden: torch.Tensor, asked: _Asked) -> _Part:
    vocab_size = model.config.vocab_size
    k = asked.num_top(vocab_size)
    scored = asked.scored(vocab_size)
    rows, targets = Packed(scored.rows, np.array(asked.targets, np.int64)).to(hidden.device)
    num_tokens = len(asked.targets)
    is_sorted = k == vocab_size
    # Whole rows go to the host slice by slice: on the device they would take memory that nobody has set aside.
    at = torch.device("cpu") if is_sorted else hidden.device
    pinned = is_sorted and hidden.device.type == "cuda"
    # Allocated before the slices' large tensors: between them, they would keep that memory from being reused.
    columns = (
        torch.empty(num_tokens, device=at, pin_memory=pinned),
        torch.empty(num_tokens, dtype=torch.int32, device=at, pin_memory=pinned),
        torch.empty(num_tokens, k, dtype=torch.int32, device=at, pin_memory=pinned),
        torch.empty(num_tokens, k, device=at, pin_memory=pinned),
    )
    for start in range(0, num_tokens, scored.step):
        part = slice(start, start + scored.step)
        _score(model.logits(hidden[rows[part]]).float(), targets[part], [column[part] for column in columns])
    return _Part(asked.spans, *(column.to("cpu", non_blocking=True) for column in columns))


def _score(logits: torch.Tensor, targets: torch.Tensor, columns: Sequence[torch.Tensor]) -> None:
    chosen, ranks, top_ids, top = columns
    own = targets.unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen.copy_(logprobs.gather(1, own).squeeze(1), non_blocking=True)
    ranks.copy_(((logits > logits.gather(1, own)).sum(dim=-1) + 1).to(ranks.dtype), non_blocking=True)
    if top.shape[1]:
        found = most_likely(logits, top.shape[1])
        top_ids.copy_(found.to(top_ids.dtype), non_blocking=True)
        top.copy_(logprobs.gather(1, found), non_blocking=True)
