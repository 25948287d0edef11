"""Log probabilities of sampled tokens, for the requests that ask."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from tandem.engine.request import Sequence
from tandem.sampling_params import MAX_LOGPROBS, TokenLogprobs, TopLogprob


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The log probabilities of one step, still on the device.

    Attributes:
        rows: of the step's rows, those that ask.
        num_top: how many of the most likely tokens each of them asks for.
        chosen: (len(rows),) float32, of the sampled tokens.
        top_ids: (len(rows), k) int64, k at least every num_top, the most likely first.
        top: (len(rows), k) float32, of these.
    """

    rows: SequenceOf[int]
    num_top: SequenceOf[int]
    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def to_rows(self, num_rows: int) -> list[TokenLogprobs | None]:
        """For each of the step's rows what it asked for, None if nothing. Waits for the device."""
        found: list[TokenLogprobs | None] = [None] * num_rows
        columns = (self.rows, self.num_top, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist())
        for row, num_top, chosen, ids, values in zip(*columns, strict=True):
            top = tuple(map(TopLogprob, ids[:num_top], values[:num_top]))
            found[row] = TokenLogprobs(chosen, top)
        return found


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, sequences: SequenceOf[Sequence]
) -> SampledLogprobs | None:
    """Log softmax of the model's own logits, computed for the rows that ask; None if none does.

    Args:
        logits: (num_rows, vocab_size) float32, as the model gave them.
        token_ids: (num_rows,) int64, sampled.
        sequences: one for each row.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.num_logprobs is not None]
    if not rows:
        return None
    num_top = [sequences[row].sampling.num_logprobs or 0 for row in rows]
    logprobs = torch.log_softmax(logits[rows], dim=-1)
    chosen = logprobs.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1)
    # Always the same k: among equals, which ones topk gives may depend on it, and no row may depend on another.
    k = min(MAX_LOGPROBS, logits.shape[1]) if any(num_top) else 0
    top, top_ids = logprobs.topk(k, dim=-1)
    return SampledLogprobs(rows, num_top, chosen, top_ids, top)
