"""Sampling parameters of a drafter's passes in CUDA graphs, and the drafts that they leave on the device."""

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.attention.drafted_layout import MAX_STATES
from tandem.engine.drafted_row import SampledRow
from tandem.engine.randomness import uniforms
from tandem.engine.upload import Packed

# Passes in a row: a step computes at most so many tokens of a sequence.
MAX_PASSES = MAX_STATES
# Of the staged numbers, and of the random numbers behind them.
_TOKEN_IDS, _PASS, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _NUM_ARRAYS = range(7)


def draws_whole(row: SampledRow) -> bool:
    """Returns whether the row's next tokens depend on nothing but logits and the parameters that are staged."""
    sampling = row.sampling
    return not sampling.has_penalties and row.bias is None and row.allowed is None and not row.must_go_on


class PassDraws:
    """
    Attributes:
        token_ids: (max_rows,) int64, the newest of each row.
        drawn: (MAX_PASSES, max_rows) int64, by pass.
        has_filters: whether top-k or top-p of a drawing row may drop tokens.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        from tandem.engine.draft_models.draw_kernel import draw_tokens

        self._draw = draw_tokens
        self._max_rows = max_rows
        packed = Packed(self._staged().ravel())
        self._memory = torch.zeros(packed.num_bytes, dtype=torch.uint8, device=device)
        [numbers] = packed.views(self._memory)
        arrays = numbers[: (_NUM_ARRAYS + MAX_PASSES) * max_rows].view(-1, max_rows)
        self._ints, self._floats = arrays, arrays.view(torch.float64)
        self.token_ids = self._ints[_TOKEN_IDS]
        self.has_filters = False
        self.drawn = torch.zeros(MAX_PASSES, max_rows, dtype=torch.int64, device=device)

    def begin(self, token_ids: Sequence[int], rows: Sequence[SampledRow]) -> None:
        """Gives the first pass its tokens. Args: rows: with parameters to draw by; none: the most likely are drawn."""
        assert len(token_ids) <= self._max_rows
        staged = self._staged()
        staged[_TOKEN_IDS, : len(token_ids)] = token_ids
        floats = staged.view(np.float64)
        self.has_filters = False
        drawing = [place for place, row in enumerate(rows) if not row.sampling.is_greedy]
        if drawing:
            params = [rows[place].sampling for place in drawing]
            self.has_filters = any(p.has_filters for p in params)
            floats[_TEMPERATURE, drawing] = [p.temperature for p in params]
            staged[_TOP_K, drawing] = [p.top_k for p in params]
            floats[_TOP_P, drawing] = [p.top_p for p in params]
            floats[_MIN_P, drawing] = [p.min_p for p in params]
            positions = np.array([rows[place].length for place in drawing]) + np.arange(MAX_PASSES)[:, None]
            floats[_NUM_ARRAYS:, drawing] = uniforms([p.seed for p in params], positions)
        Packed(staged.ravel()).copy_to(self._memory)

    def draw(self, logits: torch.Tensor, has_filters: bool) -> None:
        """Draws the next token of the first rows into token_ids and the pass's row of `drawn`, and counts the pass.

        Args:
            logits: (num_rows, vocab_size) bfloat16.
            has_filters: whether `begin` may have staged filters.
        """
        num_rows, floats = len(logits), self._floats[:, : len(logits)]
        number = self._ints[_PASS, :1]
        self._draw(
            logits,
            floats[_TEMPERATURE],
            self._ints[_TOP_K, :num_rows],
            floats[_TOP_P],
            floats[_MIN_P],
            self._floats[_NUM_ARRAYS:],
            number,
            self.token_ids[:num_rows],
            self.drawn,
            has_filters,
        )
        number.add_(1)

    def _staged(self) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        return np.zeros((_NUM_ARRAYS + MAX_PASSES, self._max_rows), np.int64)
