from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.drafted_row import SampledRow
from tandem.engine.rows import replace_rows, select_rows
from tandem.engine.upload import Packed, to_device
from tandem.sampling_params import TokenLogprobs, TopLogprob


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log probabilities of one step, on their way to the host in pinned memory.

    Attributes:
        rows: the rows that ask.
        chosen: (len(rows),) float32, of the sampled tokens.
        top_ids: (len(rows), k) int64, k at least every num_top, the most likely first or the tokens that the row names.
        top: (len(rows), k) float32, of top_ids.
    """

    rows: Sequence[int]
    num_top: Sequence[int]
    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def to_rows(self, num_rows: int) -> list[TokenLogprobs | None]:
        """Returns one entry per row, None where not requested. They must have arrived."""
        found: list[TokenLogprobs | None] = [None] * num_rows
        columns = (self.rows, self.num_top, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist())
        for row, num_top, chosen, ids, values in zip(*columns, strict=True):
            top = tuple(map(TopLogprob, ids[:num_top], values[:num_top]))
            found[row] = TokenLogprobs(chosen, top)
        return found


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, sequences: Sequence[SampledRow]
) -> SampledLogprobs | None:
    """Computes the log softmax of the model's own logits for the rows that ask.

    Args:
        logits: (num_rows, vocab_size) float32, unprocessed.
        token_ids: (num_rows,) int64, sampled.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.num_logprobs is not None]
    if not rows:
        return None
    named = [sequences[row].sampling.logprob_token_ids for row in rows]
    num_likely = [0 if ids else sequences[row].sampling.num_logprobs or 0 for row, ids in zip(rows, named, strict=True)]
    on_device = to_device(rows, logits.device)
    asked = select_rows(logits, on_device)
    logprobs = torch.log_softmax(asked, dim=-1)
    chosen = logprobs.gather(1, select_rows(token_ids, on_device).unsqueeze(1)).squeeze(1)
    # By logits, because different logits may round to equal log probabilities.
    top_ids = _with_named(most_likely(asked, min(max(num_likely), logits.shape[1])), named)
    num_top = [len(ids) or num for ids, num in zip(named, num_likely, strict=True)]
    top = logprobs.gather(1, top_ids)
    # torch uses pinned memory here.
    chosen, top_ids, top = (found.to("cpu", non_blocking=True) for found in (chosen, top_ids, top))
    return SampledLogprobs(rows, num_top, chosen, top_ids, top)


def _with_named(top_ids: torch.Tensor, named: Sequence[Sequence[int]]) -> torch.Tensor:
    """Replaces the rows that name their tokens. Args: top_ids: (num_rows, k) int64."""
    rows = [row for row, ids in enumerate(named) if ids]
    if not rows:
        return top_ids
    width = max(top_ids.shape[1], max(map(len, named)))
    by_row = np.zeros((len(rows), width), dtype=np.int64)
    for ids, row in zip(by_row, rows, strict=True):
        ids[: len(named[row])] = named[row]
    at, replaced = Packed(np.array(rows), by_row.ravel()).to(top_ids.device)
    padded = torch.nn.functional.pad(top_ids, (0, width - top_ids.shape[1]))
    return replace_rows(padded, at, replaced.view(len(rows), width))


def most_likely(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Returns (num_rows, k) int64 ids from (num_rows, vocab_size) float32 logits, the most likely first, the lower id
    among equals.

    topk may order equal values by k and by the number of rows, so the keys are distinct: a value and an id. Below zero,
    a float's bits without the sign, read as an integer, reverse the order of values.
    """
    vocab_size = logits.shape[1]
    below_zero = logits - logits.amax(dim=-1, keepdim=True)
    keys = below_zero.abs().view(torch.int32).long() * vocab_size + torch.arange(vocab_size, device=logits.device)
    return keys.topk(k, dim=-1, largest=False).values % vocab_size
