"""From logits to token ids.

The order is that of vLLM and, as far as it goes, of OpenAI's API. x are a row's logits:

0. allowed:     x[i] = -inf for tokens that the sequence's grammar or its allowed_token_ids forbid
   min_tokens:  x[i] = -inf for the stop tokens while the output is shorter, unless nothing else may follow
1. bias:        x[i] += logit_bias[i]
2. repetition:  x[i] = x[i] / r if x[i] > 0 else x[i] * r, for i in prompt and output (Keskar et al., "CTRL", 2019)
3. frequency:   x[i] -= f * (count of i in the output)
   presence:    x[i] -= p if i is in the output
4. greedy rows: the largest x, the lowest id among equals; steps 5 to 7 skip these rows
5. temperature: x = (x - max(x)) / T
6. min-p:       keep i if exp(x[i]) >= min_p, which is p[i] >= min_p * max(p) (Nguyen et al., 2024)
   top-k:       keep i if x[i] >= the k-th largest x, with all ties
   top-p:       keep i if the tokens before it have less than top_p of the probability kept so far, the most likely
                first and the lower id among equals (Holtzman et al., 2019); the first is always kept
7. draw:        the first i, by token id, where the sum of p up to i exceeds u times the whole sum; u in [0, 1) is a
                function of seed and position (tandem.engine.randomness)

Rows are independent, so a request gets the same tokens alone and in any batch. The host never waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.drafted_row import SampledRow
from tandem.engine.draws import Draws, draw
from tandem.engine.grammars import WORD_BITS, Constraint, Grammars
from tandem.engine.logprobs import SampledLogprobs, gather_logprobs
from tandem.engine.rows import replace_rows, select_rows
from tandem.engine.upload import Packed


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """
    Attributes:
        token_ids: (num_rows,) int64, on the device of the logits.
    """

    token_ids: torch.Tensor
    logprobs: SampledLogprobs | None = None


def sample(
    logits: torch.Tensor,
    sequences: Sequence[SampledRow],
    input_ids: torch.Tensor | None = None,
    grammars: Grammars | None = None,
) -> SamplerOutput:
    """Samples the next token of each row without waiting for the device.

    Args:
        logits: (num_rows, vocab_size) float32; left unchanged.
        input_ids: (num_rows,) or (num_rows, n) int64 on the device of the logits, each row's newest tokens; needed if
            some are pending, which are all of a row's or none.
        grammars: needed if a sequence has a constraint; its tokens must all be known.
    """
    if all(sequence.needs_argmax_only for sequence in sequences):
        return SamplerOutput(torch.argmax(logits, dim=-1))
    processed = process_logits(_go_on(_allow(logits, sequences, grammars), sequences), sequences, input_ids)
    are_greedy = [sequence.sampling.is_greedy for sequence in sequences]
    if all(are_greedy):
        token_ids = torch.argmax(processed, dim=-1)
    else:
        draws = Draws.of(sequences, logits.shape[1], logits.device)
        token_ids = draw(select_rows(processed, draws.rows), draws)
        if any(are_greedy):
            token_ids = torch.argmax(processed, dim=-1).index_copy_(0, draws.rows, token_ids)
    return SamplerOutput(token_ids, gather_logprobs(logits, token_ids, sequences))


def process_logits(
    logits: torch.Tensor, sequences: Sequence[SampledRow], input_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Steps 1 to 3, also for greedy rows, on a copy if anything changes."""
    return _penalize(_add_bias(logits, sequences), sequences, input_ids)


def _allow(logits: torch.Tensor, sequences: Sequence[SampledRow], grammars: Grammars | None) -> torch.Tensor:
    """Step 0, grammars and allowed tokens. No row has both."""
    rows = [row for row, s in enumerate(sequences) if s.constraint is not None or s.allowed is not None]
    if not rows:
        return logits
    bits_of = np.zeros((len(rows), -(-logits.shape[1] // WORD_BITS)), dtype=np.int32)
    bound: list[int] = []
    outputs: list[tuple[Constraint, Sequence[int], int]] = []
    constraints: list[tuple[Constraint, Sequence[int]]] = []
    for place, row in enumerate(rows):
        sequence = sequences[row]
        if (allowed := sequence.allowed) is not None:
            bits_of[place, : len(allowed)] = allowed
            continue
        assert sequence.constraint is not None and not sequence.num_pending
        outputs.append((sequence.constraint, sequence.token_ids, sequence.prompt_len))
        constraints.append((sequence.constraint, sequence.sampling.stop_token_ids))
        bound.append(place)
    if bound:
        assert grammars is not None
        grammars.follow(outputs)
        bits_of[bound] = grammars.masks(constraints)
    on_device, masks = Packed(np.array(rows), bits_of.ravel()).to(logits.device)
    # At most a quarter of the logits' memory, as bytes.
    bits = masks.view(torch.uint8).view(len(rows), -1, 1) >> torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_forbidden = (bits & 1).view(len(rows), -1)[:, : logits.shape[1]] == 0
    return replace_rows(logits, on_device, select_rows(logits, on_device).masked_fill(is_forbidden, -torch.inf))


def _go_on(logits: torch.Tensor, sequences: Sequence[SampledRow]) -> torch.Tensor:
    """Step 0, min_tokens."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.must_go_on]
    if not rows:
        return logits
    vocab_size = logits.shape[1]
    ends = [np.array([i for i in sequences[row].stop_token_ids if i < vocab_size], dtype=np.int64) for row in rows]
    on_device, at = Packed(np.array(rows), _places(ends, vocab_size)).to(logits.device)
    x = select_rows(logits, on_device)
    without_ends = x.reshape(-1).index_fill(0, at, -torch.inf).view_as(x)
    # If a grammar allows only an end, the output ends.
    may_go_on = without_ends.amax(dim=-1, keepdim=True) > -torch.inf
    return replace_rows(logits, on_device, torch.where(may_go_on, without_ends, x))


def _add_bias(logits: torch.Tensor, sequences: Sequence[SampledRow]) -> torch.Tensor:
    """Step 1."""
    biased = [(row, s.bias) for row, s in enumerate(sequences) if s.bias is not None]
    if not biased:
        return logits
    vocab_size = logits.shape[1]
    # Ids are sorted; one too large would be a token of the next row.
    assert all(bias.token_ids[-1] < vocab_size for _, bias in biased)
    places = np.concatenate([bias.token_ids + row * vocab_size for row, bias in biased])
    values = np.concatenate([bias.values for _, bias in biased])
    at, added = Packed(places, values).to(logits.device)
    logits = logits.clone(memory_format=torch.contiguous_format)
    logits.view(-1).scatter_add_(0, at, added.to(logits.dtype))
    return logits


def _penalize(logits: torch.Tensor, sequences: Sequence[SampledRow], input_ids: torch.Tensor | None) -> torch.Tensor:
    """Steps 2 and 3."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.has_penalties]
    if not rows:
        return logits
    penalized = [sequences[row] for row in rows]
    assert input_ids is not None or not any(s.num_pending for s in penalized)
    vocab_size = logits.shape[1]
    known = [s.known_ids() for s in penalized]
    # Only a repetition penalty needs the prompt.
    prompt_lens = [s.prompt_len if s.sampling.repetition_penalty != 1 else 0 for s in penalized]
    prompts = [ids[:num] for ids, num in zip(known, prompt_lens, strict=True)]
    outputs = [ids[s.prompt_len :] for ids, s in zip(known, penalized, strict=True)]
    numbers = [
        (s.num_pending > 0, s.sampling.repetition_penalty, s.sampling.frequency_penalty, s.sampling.presence_penalty)
        for s in penalized
    ]
    on_device, in_prompt, in_output, by_row = Packed(
        np.array(rows),
        _places(prompts, vocab_size),
        _places(outputs, vocab_size),
        np.array(numbers, dtype=np.float64).ravel(),
    ).to(logits.device)
    is_pending, repetition, frequency, presence = by_row.to(logits.dtype).view(-1, 4, 1).unbind(1)
    x = select_rows(logits, on_device)
    # Sums of ones are exact in float32, in any order.
    counts = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    counts.view(-1).scatter_add_(0, in_output, torch.ones_like(in_output, dtype=x.dtype))
    if input_ids is not None:
        newest = select_rows(input_ids, on_device).view(len(rows), -1)
        counts.scatter_add_(1, newest, is_pending.expand(newest.shape))
    is_output = counts > 0
    is_known = is_output.view(-1).index_fill(0, in_prompt, True).view_as(is_output)
    x = torch.where(is_known, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * counts
    x -= presence * is_output
    return replace_rows(logits, on_device, x)


def _places(token_ids: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Flat indices in a (len(token_ids), vocab_size) matrix."""
    ids = np.concatenate(token_ids)
    # One too large would be a token of the next row.
    assert ids.max(initial=0) < vocab_size
    return ids + np.repeat(np.arange(len(token_ids)) * vocab_size, [len(row) for row in token_ids])
