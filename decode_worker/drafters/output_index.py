"""Latest outputs of several requests, searched by their 3-grams."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tandem.decode_worker.drafters.ngram import MAX_MATCH

# Tokens kept, a power of two. With the index, 20 bytes each.
NUM_KEPT = 65_536
# Latest tokens that are taken of one output: 1 ms.
MAX_OUTPUT = 8192
# Tokens before a draft that must occur in the outputs. Shorter repetitions are right at chance.
MIN_MATCH = 3
# Latest occurrences that are compared in a search, which takes 5 to 20 us.
MAX_CANDIDATES = 8
END = -1
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_MASK = NUM_KEPT - 1

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class OutputIndex:
    """A ring of tokens. Each 3-gram's hash leads to its last occurrence, and each occurrence to the one before.

    Places count from 1 over all tokens ever added, so that an overwritten place is known by its number, and 0 is none.
    """

    def __init__(self) -> None:
        self._tokens = np.full(NUM_KEPT, END, np.int32)
        # Place behind the last occurrence, by hash; and behind the one before, by that place.
        self._last = np.zeros(NUM_KEPT, np.int64)
        self._before = np.zeros(NUM_KEPT, np.int64)
        self._end = 1

    def add(self, output_ids: Sequence[int]) -> None:
        output = np.array(output_ids[-MAX_OUTPUT:], np.int64)
        places = np.arange(self._end, self._end + len(output) + 1)
        self._tokens[places & _MASK] = [*output.tolist(), END]
        self._end += len(places)
        # Something must follow.
        if len(output) <= MIN_MATCH:
            return
        hashes = _hash(output[:-3], output[1:-2], output[2:-1])
        behind = places[MIN_MATCH:-1]
        before = self._last[hashes]
        order = np.argsort(hashes, kind="stable")
        is_again = hashes[order[1:]] == hashes[order[:-1]]
        before[order[1:][is_again]] = behind[order[:-1][is_again]]
        self._before[behind & _MASK] = before
        # Of equal hashes the last stays.
        self._last[hashes] = behind

    def propose(self, token_ids: Sequence[int], max_tokens: int, longer_than: int) -> list[int]:
        """Returns what followed the latest of the longest repetitions of the sequence's ending.

        Args:
            longer_than: tokens that must be fewer than those of the repetition.
        """
        if len(token_ids) < MIN_MATCH:
            return []
        ending = token_ids[-MAX_MATCH:][::-1]
        place = int(self._last[_hash(ending[2], ending[1], ending[0])])
        found, longest = 0, max(longer_than, MIN_MATCH - 1)
        for _ in range(MAX_CANDIDATES):
            # Before the oldest place that its whole repetition and followers are kept from.
            if place <= self._end - NUM_KEPT + MAX_MATCH:
                break
            num_matched = self._num_matched(place, ending)
            if num_matched > longest:
                found, longest = place, num_matched
                if longest == MAX_MATCH:
                    break
            place = int(self._before[place & _MASK])
        if not found:
            return []
        places = np.arange(found, min(found + max_tokens, self._end)) & _MASK
        followers: list[int] = self._tokens[places].tolist()
        return followers[: followers.index(END)] if END in followers else followers

    def _num_matched(self, place: int, ending: Sequence[int]) -> int:
        for number, token_id in enumerate(ending):
            if self._tokens[(place - 1 - number) & _MASK] != token_id:
                return number
        return len(ending)


def _hash(first: Any, second: Any, third: Any) -> Any:
    """Args: token ids, or arrays of them in int64."""
    mixed = first * _FACTORS[0] ^ second * _FACTORS[1] ^ third * _FACTORS[2]
    return (mixed >> 13) & _MASK
