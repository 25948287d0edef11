from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.engine.rows import select_rows
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device
from tandem.sampling_params import TokenLogprobs, TopLogprob


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log probabilities of one step, on their way to the host in pinned memory.

    Attributes:
        rows: the rows that ask.
        chosen: (len(rows),) float32, of the sampled tokens.
        top_ids: (len(rows), k) int64, k at least every num_top, the most likely first.
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
    logits: torch.Tensor, token_ids: torch.Tensor, sequences: Sequence[TokenSequence]
) -> SampledLogprobs | None:
    """Computes the log softmax of the model's own logits for the rows that ask.

    Args:
        logits: (num_rows, vocab_size) float32, unprocessed.
        token_ids: (num_rows,) int64, sampled.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.num_logprobs is not None]
    if not rows:
        return None
    num_top = [sequences[row].sampling.num_logprobs or 0 for row in rows]
    on_device = to_device(rows, logits.device)
    asked = select_rows(logits, on_device)
    logprobs = torch.log_softmax(asked, dim=-1)
    chosen = logprobs.gather(1, select_rows(token_ids, on_device).unsqueeze(1)).squeeze(1)
    # By logits, because different logits may round to equal log probabilities.
    top_ids = most_likely(asked, min(max(num_top), logits.shape[1]))
    top = logprobs.gather(1, top_ids)
    # torch uses pinned memory here.
    chosen, top_ids, top = (found.to("cpu", non_blocking=True) for found in (chosen, top_ids, top))
    return SampledLogprobs(rows, num_top, chosen, top_ids, top)


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
