"""Steps 5 to 7 of tandem.engine.sampler: the tokens of the rows that are not greedy.

A probability is an integer, its mass, in units of 2**-MASS_BITS of the most likely token's. Integer sums do not depend
on the order of addition, so a row draws the same token in any batch and by any method.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.drafted_row import SampledRow
from tandem.engine.randomness import uniform
from tandem.engine.rows import replace_rows, select_rows
from tandem.engine.upload import Packed

# Finer than float32, and two million tokens as likely as the first still fit into 63 bits.
MASS_BITS = 42
MAX_SELECTED = 1024
# Divides most vocabulary sizes; other rows are padded.
PIECE_SIZE = 128


@dataclass(frozen=True, slots=True)
class _Cut:
    """
    Attributes:
        rows: (n,) int64, indices among the drawn rows.
        num_largest: at least every row's top-k.
        last_kept: (n, 1) int64, top-k minus one.
        top_p: (n, 1) float64; None if all are 1.
    """

    rows: torch.Tensor
    num_largest: int
    last_kept: torch.Tensor
    top_p: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Draws:
    """
    Attributes:
        rows: (num_drawn,) int64, the step's rows that are not greedy.
        temperature: (num_drawn, 1) float32.
        min_p: (num_drawn, 1) float32; None if all are 0.
        u: (num_drawn, 1) float64, random, in [0, 1).
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor | None
    u: torch.Tensor
    cuts: Sequence[_Cut]

    @classmethod
    def of(cls, sequences: Sequence[SampledRow], vocab_size: int, device: torch.device) -> "Draws":
        rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
        params = [sequences[row].sampling for row in rows]
        u = [uniform(sequences[row].sampling.seed, sequences[row].length) for row in rows]
        # Rows with a small top-k need no sort, and rows without top-p skip its work.
        groups: dict[tuple[bool, bool], list[int]] = {}
        for i, p in enumerate(params):
            if p.has_filters:
                groups.setdefault((0 < p.top_k <= MAX_SELECTED, p.top_p < 1), []).append(i)
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        columns = [_ints(rows), _floats(p.temperature for p in params), _floats(p.min_p for p in params), _floats(u)]
        for group in groups.values():
            columns += [_ints(group), _ints(top_k[i] - 1 for i in group), _floats(params[i].top_p for i in group)]
        uploaded = Packed(*columns).to(device)
        cuts = []
        for number, ((is_selected, has_top_p), group) in enumerate(groups.items()):
            group_rows, last_kept, top_p = uploaded[4 + 3 * number : 7 + 3 * number]
            num_largest = max(top_k[i] for i in group) if is_selected else vocab_size
            cuts.append(
                _Cut(group_rows, num_largest, last_kept.unsqueeze(1), top_p.unsqueeze(1) if has_top_p else None)
            )
        return cls(
            uploaded[0],
            uploaded[1].float().unsqueeze(1),
            uploaded[2].float().unsqueeze(1) if any(p.min_p > 0 for p in params) else None,
            uploaded[3].unsqueeze(1),
            cuts,
        )


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Returns (num_drawn,) int64. Args: logits: (num_drawn, vocab_size) float32, processed."""
    masses = _masses(filter_logits(logits, draws))
    total = masses.sum(dim=-1, keepdim=True)
    # A float64 may exceed the sum that it rounds.
    threshold = torch.minimum((draws.u * total).to(torch.int64), total - 1)
    return _first_beyond(masses, threshold).squeeze(1)


def filter_logits(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Steps 5 and 6 on a copy; dropped tokens get -inf. Args: logits: (num_drawn, vocab_size) float32, processed."""
    # The largest is exactly 0 before the division, so an overflow at small temperatures is harmless.
    x = logits - logits.amax(dim=-1, keepdim=True)
    x /= draws.temperature
    if draws.min_p is not None:
        x.masked_fill_(x < draws.min_p.log(), -torch.inf)
    for cut in draws.cuts:
        x = replace_rows(x, cut.rows, _keep_top(select_rows(x, cut.rows), cut))
    return x


def _keep_top(x: torch.Tensor, cut: _Cut) -> torch.Tensor:
    """Applies top-k, then top-p, to a copy of x, (n, vocab_size), 0 at the largest; dropped tokens get -inf.

    The largest logits may lack some ties, so ties are counted in x.
    """
    if cut.num_largest <= MAX_SELECTED:
        largest = x.topk(cut.num_largest, dim=-1).values
    else:
        largest = x.sort(dim=-1, descending=True).values
    kth = largest.gather(1, cut.last_kept)
    if cut.top_p is None:
        return x.masked_fill(x < kth, -torch.inf)
    masses = _masses(largest)
    before = masses.cumsum(dim=-1) - masses
    num_above = _num_true(largest > kth)
    num_equal = _num_true(x >= kth) - num_above
    total = before.gather(1, num_above) + num_equal * masses.gather(1, num_above)
    # A token is kept if the mass before it is below this limit. The first always is.
    limit = torch.minimum((cut.top_p * total).ceil().to(torch.int64), total).clamp(min=1)
    smallest = largest.gather(1, _num_true(before < limit) - 1)
    num_above = _num_true(largest > smallest)
    mass_left = limit - before.gather(1, num_above)
    mass = masses.gather(1, num_above)
    num_kept_equal = (mass_left + mass - 1) // mass
    equal = x == smallest
    last_kept = _first_beyond(equal, num_kept_equal - 1)
    ids = torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((x < smallest) | (equal & (ids > last_kept)), -torch.inf)


def _masses(x: torch.Tensor) -> torch.Tensor:
    return x.exp().mul_(2.0**MASS_BITS).to(torch.int64)


def _num_true(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dim=-1, keepdim=True)


def _first_beyond(amounts: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Returns each row's first i where the sum of the amounts up to i exceeds the threshold: (num_rows, 1) int64.

    Finds the piece, then the place in it: a running sum over whole rows would use a small part of a GPU.

    Args:
        amounts: (num_rows, columns), not negative.
        threshold: (num_rows, 1) int64, less than the row's sum.
    """
    num_columns = amounts.shape[1]
    padding = -num_columns % PIECE_SIZE
    if padding:
        amounts = torch.nn.functional.pad(amounts, (0, padding))
    pieces = amounts.unflatten(1, (-1, PIECE_SIZE))
    sums = pieces.sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    # A row with a non-finite logit draws an arbitrary token, but must stay within memory.
    piece = torch.searchsorted(ends, threshold, right=True).clamp_(max=ends.shape[1] - 1)
    rest = threshold - (ends - sums).gather(1, piece)
    within = pieces.gather(1, piece.unsqueeze(2).expand(-1, 1, PIECE_SIZE)).squeeze(1).cumsum(dim=-1)
    place = piece * PIECE_SIZE + torch.searchsorted(within, rest, right=True)
    return place.clamp_(max=num_columns - 1)


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _floats(values: Iterable[float]) -> np.ndarray:
    return np.fromiter(values, np.float64)
