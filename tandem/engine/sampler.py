"""From logits to token ids.

In this order, which is that of vLLM and, for what it has, of OpenAI's API; x are a row's logits, and tokens are of its
sequence:

1. bias:        x[i] += logit_bias[i]
2. repetition:  x[i] = x[i] / r if x[i] > 0 else x[i] * r, for i in prompt and output (Keskar et al., "CTRL", 2019)
3. frequency:   x[i] -= f * (how often i is in the output)
   presence:    x[i] -= p if i is in the output
4. greedy rows: the largest x, the lowest id among equals. They end here.
5. temperature: x = (x - max(x)) / T
6. min-p:       keep i if exp(x[i]) >= min_p, which is p[i] >= min_p * max(p) (Nguyen et al., 2024)
   top-k:       keep i if x[i] >= the k-th largest x; among equals there all are kept
   top-p:       keep i if the tokens before it, the most likely first and the lower id among equals, have together less
                than top_p of the probability of those kept so far (Holtzman et al., 2019); the first is always kept
7. draw:        the first i, in order of token ids, where the sum of p up to i exceeds u times the whole sum, with u in
                [0, 1) a function of seed and position (tandem.engine.randomness)

Nothing of a row depends on the other rows, so a request gets the same tokens alone and in any batch.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from tandem.engine.logprobs import SampledLogprobs, gather_logprobs
from tandem.engine.randomness import uniform
from tandem.engine.request import Sequence
from tandem.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """
    Attributes:
        token_ids: (num_rows,) int64, on the device of the logits.
        logprobs: of the rows that ask; None if none does.
    """

    token_ids: torch.Tensor
    logprobs: SampledLogprobs | None = None


def sample(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> SamplerOutput:
    """Chooses the next token of each row.

    Args:
        logits: (num_rows, vocab_size) float32; left as they are.
        sequences: one for each row, all their tokens known.
    """
    if all(sequence.sampling.needs_argmax_only for sequence in sequences):
        return SamplerOutput(torch.argmax(logits, dim=-1))
    processed = process_logits(logits, sequences)
    token_ids = torch.argmax(processed, dim=-1)
    rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
    if rows:
        token_ids[rows] = _draw(processed[rows], [sequences[row] for row in rows])
    return SamplerOutput(token_ids, gather_logprobs(logits, token_ids, sequences))


def process_logits(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
    """Steps 1 to 3, which hold for greedy rows too: a copy where anything changes."""
    return _penalize(_add_bias(logits, sequences), sequences)


def filter_logits(logits: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    """Steps 5 and 6.

    Args:
        logits: (num_rows, vocab_size) float32, processed.
        params: one for each row, none of them greedy.

    Returns:
        A copy: logits of the distribution to draw from, -inf for what is not kept.
    """
    # The largest is exactly 0 before the division, whose overflow for small temperatures is harmless then.
    x = logits - logits.amax(dim=-1, keepdim=True)
    x /= _parameter([p.temperature for p in params], x)
    if any(p.min_p > 0 for p in params):
        x = x.masked_fill(x < _parameter([p.min_p for p in params], x).log(), -torch.inf)
    rows = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if rows:
        x[rows] = _keep_top(x[rows], [params[row] for row in rows])
    return x


def _add_bias(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
    """Step 1, on a copy if there is anything to add."""
    rows: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for row, sequence in enumerate(sequences):
        for token_id, bias in sequence.sampling.logit_bias:
            rows.append(row)
            ids.append(token_id)
            values.append(bias)
    if not rows:
        return logits
    logits = logits.clone()
    logits[_column(rows, logits), _column(ids, logits)] += torch.tensor(values, dtype=logits.dtype).to(logits.device)
    return logits


def _penalize(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
    """Steps 2 and 3, on a copy if there is anything to change."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.has_penalties]
    if not rows:
        return logits
    penalized = [sequences[row] for row in rows]
    params = [sequence.sampling for sequence in penalized]
    x = logits[rows]
    in_output = _count([s.token_ids[s.prompt_len :] for s in penalized], x)
    in_prompt = _count([s.token_ids[: s.prompt_len] for s in penalized], x)
    repetition = _parameter([p.repetition_penalty for p in params], x)
    x = torch.where(in_output + in_prompt > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= _parameter([p.frequency_penalty for p in params], x) * in_output
    x -= _parameter([p.presence_penalty for p in params], x) * (in_output > 0)
    logits = logits.clone()
    logits[rows] = x
    return logits


def _count(token_ids: SequenceOf[SequenceOf[int]], like: torch.Tensor) -> torch.Tensor:
    """How often each row's list has each token of the vocabulary: like `like`, (num_rows, vocab_size) float32."""
    rows = torch.repeat_interleave(torch.tensor([len(ids) for ids in token_ids])).to(like.device)
    ids = _column([i for ids in token_ids for i in ids], like)
    # Sums of ones are exact in float32, in whatever order they are made.
    return torch.zeros_like(like).index_put_((rows, ids), torch.ones_like(ids, dtype=like.dtype), accumulate=True)


def _draw(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
    """Steps 5 to 7: (num_rows,) int64."""
    x = filter_logits(logits, [sequence.sampling for sequence in sequences])
    # In float64: a sum over a vocabulary in float32 is off by more than the rarest tokens' probabilities.
    cumulated = torch.softmax(x, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    u = torch.tensor([uniform(s.sampling.seed, len(s.token_ids)) for s in sequences], dtype=torch.float64)
    threshold = u.to(x.device).unsqueeze(1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(1)


def _keep_top(x: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    """Top-k, then top-p; -inf for what is not kept. Args: x (num_rows, vocab_size), -inf for what is out already."""
    vocab_size = x.shape[1]
    # Stable, so that among equals the lower ids come first.
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    last_kept = [min(p.top_k, vocab_size) - 1 if p.top_k > 0 else vocab_size - 1 for p in params]
    values.masked_fill_(values < values.gather(1, _column(last_kept, x).unsqueeze(1)), -torch.inf)
    probabilities = torch.softmax(values, dim=-1).double()
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = _parameter([p.top_p for p in params], before)
    # Rounding may take `before` to 1: a row whose top_p is 1 must still keep all, as it does where nobody sorts.
    dropped = (before >= top_p) & (top_p < 1)
    dropped[:, 0] = False
    values.masked_fill_(dropped, -torch.inf)
    return torch.empty_like(x).scatter_(1, ids, values)


def _column(values: SequenceOf[int], like: torch.Tensor) -> torch.Tensor:
    """(len(values),) int64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.int64).to(like.device)


def _parameter(values: SequenceOf[float], like: torch.Tensor) -> torch.Tensor:
    """One value for each row, to broadcast over the vocabulary: (num_rows, 1) in the dtype of `like`."""
    return torch.tensor(values, dtype=like.dtype).to(like.device).unsqueeze(1)
