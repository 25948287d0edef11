"""Log probabilities of sampled tokens, for the requests that ask."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.engine.rows import select_rows
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device
from tandem.sampling_params import TokenLogprobs, TopLogprob


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The log probabilities of one step, on their way to the host: they are there once all is done that the CUDA
    stream had been given when they were gathered.

    Attributes:
        rows: of the step's rows, those that ask.
        num_top: how many of the most likely tokens each of them asks for.
        chosen: (len(rows),) float32, of the sampled tokens.
        top_ids: (len(rows), k) int64, k at least every num_top, the most likely first.
        top: (len(rows), k) float32, of these. All three in pinned memory if they come from a GPU.
    """

    rows: Sequence[int]
    num_top: Sequence[int]
    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def to_rows(self, num_rows: int) -> list[TokenLogprobs | None]:
        """For each of the step's rows what it asked for, None if nothing. Waits for nothing: it is the caller who knows
        that they have come."""
        found: list[TokenLogprobs | None] = [None] * num_rows
        columns = (self.rows, self.num_top, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist())
        for row, num_top, chosen, ids, values in zip(*columns, strict=True):
            top = tuple(map(TopLogprob, ids[:num_top], values[:num_top]))
            found[row] = TokenLogprobs(chosen, top)
        return found


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, sequences: Sequence[TokenSequence]
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
    on_device = to_device(rows, logits.device)
    asked = select_rows(logits, on_device)
    logprobs = torch.log_softmax(asked, dim=-1)
    chosen = logprobs.gather(1, select_rows(token_ids, on_device).unsqueeze(1)).squeeze(1)
    # They are chosen by the logits: what a device rounds to the same log probability may have been different before.
    top_ids = most_likely(asked, min(max(num_top), logits.shape[1]))
    top = logprobs.gather(1, top_ids)
    # They go to pinned memory, which torch takes for copies to the host that nobody waits for.
    chosen, top_ids, top = (found.to("cpu", non_blocking=True) for found in (chosen, top_ids, top))
    return SampledLogprobs(rows, num_top, chosen, top_ids, top)


def most_likely(logits: torch.Tensor, k: int) -> torch.Tensor:
    """(num_rows, k) int64 token ids, the most likely first, the lower id among equals.

    Which of equal values topk gives may depend on k and on how many rows there are, and no row may depend on another:
    so what it selects from are different numbers, each a value and an id. Below zero a float's bits without the sign,
    as an integer, are in the order of the values reversed.

    Args:
        logits: (num_rows, vocab_size) float32.
    """
    vocab_size = logits.shape[1]
    below_zero = logits - logits.amax(dim=-1, keepdim=True)
    keys = below_zero.abs().view(torch.int32).long() * vocab_size + torch.arange(vocab_size, device=logits.device)
    return keys.topk(k, dim=-1, largest=False).values % vocab_size
