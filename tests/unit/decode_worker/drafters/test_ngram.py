import random
import tracemalloc
from collections.abc import Sequence

import numpy as np

from tandem.decode_worker.drafters.ngram import MAX_MATCH, MIN_MATCH, WINDOW, NgramDrafter


def propose(token_ids: Sequence[int], max_tokens: int = 4) -> list[int]:
    return NgramDrafter().propose(token_ids, max_tokens)


def test_repeats_what_followed_the_longest_earlier_occurrence() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 8, 1, 2, 3]) == [4, 5, 6, 9]
    # Equally long ones: the latest.
    assert propose([2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3]) == [7, 8, 1, 2]


def test_says_nothing_without_a_repetition() -> None:
    assert propose([]) == propose([1]) == propose([1, 2]) == propose([1, 2, 3]) == []
    # One equal token is too little.
    assert propose([1, 2, 3, 1]) == [] and MIN_MATCH == 2


def test_goes_on_with_a_period() -> None:
    assert propose([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert propose([7, 7, 7], 3) == [7, 7, 7]


def test_agrees_with_a_slow_search_while_the_sequence_grows() -> None:
    def slow(ids: Sequence[int], most: int) -> list[int]:
        best, at = MIN_MATCH - 1, 0
        for end in range(1, len(ids)):
            length = 0
            while length < min(end, MAX_MATCH) and ids[end - 1 - length] == ids[-1 - length]:
                length += 1
            if length >= max(best, MIN_MATCH):
                best, at = length, end
        return [ids[at + n % (len(ids) - at)] for n in range(most)] if at else []

    rng = random.Random(0)
    drafter, token_ids = NgramDrafter(), list[int]()
    for _ in range(120):
        # Also repetitions longer than MAX_MATCH.
        repeated = token_ids[-30 : rng.randint(-29, -1)] if rng.random() < 0.2 else ()
        token_ids += repeated or rng.choices(range(3), k=rng.randint(1, 3))
        assert drafter.propose(token_ids, 6) == slow(token_ids, 6)


def test_memory_and_search_are_bounded() -> None:
    rng = np.random.default_rng(0)
    token_ids = rng.integers(10**6, 2**31 - 1, 100_000).tolist()
    drafter = NgramDrafter()
    tracemalloc.start()
    drafter.propose(token_ids, 4)
    for start in range(5 * WINDOW):
        # No token repeats, except that the window's first ones follow again much later.
        token_ids.append(start)
        if start % 997 == 0:
            assert drafter.propose(token_ids, 4) == []
    token_ids += token_ids[-WINDOW // 2 :][:3]
    assert drafter.propose(token_ids, 1) == [token_ids[-WINDOW // 2]]
    token_ids += token_ids[100_000:100_003]
    assert drafter.propose(token_ids, 1) == []
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(array.nbytes for array in (drafter._tokens,)) <= 8 * WINDOW and held < 40 * len(token_ids)
