import random
from collections.abc import Sequence

from tandem.decode_worker.drafters.ngram import MAX_MATCH
from tandem.decode_worker.drafters.output_index import MAX_CANDIDATES, MAX_OUTPUT, MIN_MATCH, NUM_KEPT, OutputIndex


def index_of(*outputs: Sequence[int]) -> OutputIndex:
    index = OutputIndex()
    for output in outputs:
        index.add(output)
    return index


def test_continues_the_longest_repetition_and_of_equal_ones_the_latest() -> None:
    index = index_of([9, 1, 2, 3, 4, 5], [8, 1, 2, 3, 6, 7], [7, 1, 2, 3, 0, 0])
    assert index.propose([9, 1, 2, 3], 4, 0) == [4, 5]
    assert index.propose([5, 1, 2, 3], 1, 0) == [0]
    assert index.propose([9, 1, 2, 3], 4, longer_than=3) == [4, 5]
    assert index.propose([9, 1, 2, 3], 4, longer_than=4) == index.propose([2, 3], 4, 0) == []


def test_outputs_are_not_joined() -> None:
    index = index_of([1, 2, 3], [4, 5, 6, 7])
    assert index.propose([1, 2, 3], 4, 0) == index.propose([2, 3, 4], 4, 0) == index.propose([5, 6, 7], 4, 0) == []
    assert index_of(()).propose([0, 0, 0], 4, 0) == []


def test_agrees_with_a_slow_search() -> None:
    def slow(outputs: Sequence[Sequence[int]], ending: Sequence[int], most: int) -> list[int]:
        found: list[int] = []
        longest = MIN_MATCH - 1
        for output in outputs:
            for place in range(MIN_MATCH, len(output)):
                length = 0
                while length < min(place, MAX_MATCH, len(ending)) and output[place - 1 - length] == ending[-1 - length]:
                    length += 1
                if length >= max(longest, MIN_MATCH):
                    longest, found = length, [*output[place : place + most]]
        return found

    rng = random.Random(0)
    outputs: list[list[int]] = []
    index = OutputIndex()
    num_found = 0
    for _ in range(40):
        # No 3-gram occurs so often that a search ends before it has compared all.
        output = [rng.randrange(30) for _ in range(rng.randint(0, 60))]
        if outputs and rng.random() < 0.5:
            output += rng.choice(outputs)[:20]
        index.add(output)
        outputs.append(output)
        if len(outputs) > MAX_CANDIDATES // 2:
            outputs.pop(0)
            index = index_of(*outputs)
        whole = rng.choice(outputs)
        ending = [rng.randrange(30), *whole[: rng.randint(0, len(whole))]]
        assert index.propose(ending, 4, 0) == slow(outputs, ending, 4)
        num_found += bool(slow(outputs, ending, 4))
    assert num_found > 10


def test_the_oldest_outputs_make_room() -> None:
    index = index_of([1, 2, 3, 4])
    start = 100
    while start < 100 + NUM_KEPT:
        index.add(range(start, start + 5000))
        start += 5000
        known = list(range(start - 500, start - 490))
        assert index.propose(known, 2, 0) == [start - 490, start - 489]
    assert index.propose([1, 2, 3], 4, 0) == index.propose([100, 101, 102], 4, 0) == []
    # Only the end of a long output is taken.
    index.add(range(200_000, 200_000 + 2 * MAX_OUTPUT))
    assert index.propose([200_001, 200_002, 200_003], 1, 0) == []
    assert index.propose(range(203_000 + MAX_OUTPUT, 203_005 + MAX_OUTPUT), 1, 0) == [203_005 + MAX_OUTPUT]
