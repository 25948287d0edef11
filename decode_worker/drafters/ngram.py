"""Drafts that repeat an earlier part of the request's own prompt and output."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.decode_worker.drafters.base import Drafter

# Latest tokens that are searched: 32 KiB a request, and up to 20 us a search.
WINDOW = 8192
# Tokens before a draft that must occur earlier too. Shorter repetitions say little.
MIN_MATCH = 2
# Longer repetitions are not compared further.
MAX_MATCH = 16


class NgramDrafter(Drafter):
    """Finds the longest ending of the sequence that occurs earlier in the window, and proposes what followed there.

    Of equally long ones the latest counts. A repetition that reaches the end goes on periodically.

    Attributes:
        num_matched: length of the last proposal's repetition; 0 without a proposal.
    """

    def __init__(self) -> None:
        self.num_matched = 0
        # The first `_size` tokens hold the latest ones of the sequence.
        self._tokens = np.empty(0, np.int32)
        self._size = 0
        self._num_seen = 0

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        self._take(token_ids)
        tokens = self._tokens[max(0, self._size - WINDOW) : self._size]
        end = self._latest_match(tokens)
        if end < 0:
            return []
        period = len(tokens) - end
        followed: list[int] = tokens[end : end + max_tokens].tolist()
        return [followed[number % period] for number in range(max_tokens)]

    def _take(self, token_ids: Sequence[int]) -> None:
        new = token_ids[max(self._num_seen, len(token_ids) - WINDOW) :]
        self._num_seen = len(token_ids)
        if self._size + len(new) > len(self._tokens):
            kept = self._tokens[max(0, self._size + len(new) - WINDOW) : self._size]
            self._size = len(kept)
            grown = np.empty(min(2 * WINDOW, 2 * (self._size + len(new))), np.int32)
            grown[: self._size] = kept
            self._tokens = grown
        self._tokens[self._size : self._size + len(new)] = new
        self._size += len(new)

    def _latest_match(self, tokens: "np.ndarray[Any, np.dtype[np.int32]]") -> int:
        """Returns the index behind the earlier occurrence; -1 without one."""
        self.num_matched = 0
        if len(tokens) <= MIN_MATCH:
            return -1
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        # Long repetitions are usual where drafts are right. The search below takes ten times as long for them.
        end = int(ends[-1]) + 1 if len(ends) else 0
        if end >= MAX_MATCH and tokens[end - MAX_MATCH : end].tobytes() == tokens[-MAX_MATCH:].tobytes():
            self.num_matched = MAX_MATCH
            return end
        matched = 0
        while len(ends):
            latest, matched = int(ends[-1]), matched + 1
            if matched == MAX_MATCH:
                break
            ends = ends[ends >= matched]
            ends = ends[tokens[ends - matched] == tokens[-1 - matched]]
        if matched < MIN_MATCH:
            return -1
        self.num_matched = matched
        return latest + 1
