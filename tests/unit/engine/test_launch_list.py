"""The launch list: pages that running forward passes may still touch."""

import pytest

from tandem.engine.batch import Batch
from tandem.engine.launch_list import ForwardPart
from tandem.engine.output import ForwardOutput
from tandem.engine.token_sequence import NO_TABLE, TokenSequence
from tests.fakes.engine import FakeEngine

PAGE_SIZE = 4


class Part(ForwardPart):
    """The given number of next tokens of each sequence. Attributes: ended: all ended parts, in order."""

    ended: "list[Part]"

    def __init__(self, ended: "list[Part]", sequences: dict[TokenSequence, int]) -> None:
        self.sequences = list(sequences)
        self._num_tokens = list(sequences.values())
        self.output: ForwardOutput | None = None
        self.ended = ended

    def begin(self) -> None:
        for sequence, num_tokens in zip(self.sequences, self._num_tokens, strict=True):
            sequence.extend(num_tokens)

    def launched(self, output: ForwardOutput, batch: Batch) -> None:
        self.output = output
        for sequence in self.sequences:
            sequence.complete_extend()

    def end(self) -> None:
        assert self.output is not None
        self.output.token_ids()
        self.ended.append(self)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(32, PAGE_SIZE, asynchronous=True)


def prompt(num_tokens: int, page_ids: list[int], cached_len: int = 0, table_id: int = NO_TABLE) -> TokenSequence:
    return TokenSequence(list(range(num_tokens)), num_tokens, page_ids, cached_len, table_id=table_id)


def test_forwards_end_in_launch_order(engine: FakeEngine) -> None:
    ended: list[Part] = []
    a, b = prompt(8, [0, 1]), prompt(4, [2])
    parts = [Part(ended, {a: 4}), Part(ended, {b: 4}), Part(ended, {a: 4})]
    for part in parts:
        engine.launch(prompts=part)
    assert engine.launches.parts == parts
    assert not engine.launches.is_oldest_done
    engine.run_next()
    assert engine.launches.is_oldest_done and len(engine.launches) == 3
    engine.launches.collect_all_but(1)
    assert ended == parts[:2]
    engine.launches.collect_oldest()
    assert ended == parts and len(engine.launches) == 0


def test_pages_are_used_until_all_their_forwards_complete(engine: FakeEngine) -> None:
    a, b = prompt(12, [0, 1, 2], table_id=1), prompt(5, [0, 3], cached_len=4, table_id=2)
    first, second, third = Part([], {a: 4}), Part([], {b: 1}), Part([], {a: 8})
    for part in (first, second):
        engine.launch(prompts=part)
    engine.launch(prompts=third)
    assert engine.launches.using(a.table_id) == [first.output, third.output]
    assert engine.launches.using(b.table_id) == [second.output]
    assert engine.launches.using(3) == []
    engine.run_next()
    assert engine.launches.using(a.table_id) == [third.output]
    engine.launches.collect_all_but(0)
    assert engine.launches.using(a.table_id) == engine.launches.using(b.table_id) == []


def test_page_is_ready_once_its_writing_forward_completes(engine: FakeEngine) -> None:
    a = prompt(14, [5, 6, 7, 8])
    for num_tokens in (6, 8):
        engine.launch(prompts=Part([], {a: num_tokens}))
    decoded = TokenSequence(list(range(9)), 8, [9, 10, 11], cached_len=8)
    engine.launch(decoded=Part([], {decoded: 1}))
    # In the tree, the first chunk continues in page 6, which the second one fills.
    assert [engine.launches.num_ready(pages) for pages in ([5, 6], [9, 5, 6, 7], [9, 10], [])] == [0, 1, 2, 0]
    engine.run_next()
    assert [engine.launches.num_ready(pages) for pages in ([5, 6], [5, 7, 6], [8])] == [1, 1, 0]
    engine.run_next()
    assert engine.launches.num_ready([5, 6, 7, 8]) == 4


def test_mixed_forward_is_one_launch() -> None:
    engine = FakeEngine(32, PAGE_SIZE, asynchronous=True, min_mixed=1)
    ended: list[Part] = []
    decoded = TokenSequence(list(range(9)), 8, [9, 10, 11], cached_len=8, table_id=1)
    prompt_of_another = prompt(8, [5, 6], table_id=2)
    parts = [Part(ended, {decoded: 1}), Part(ended, {prompt_of_another: 8})]
    engine.launch(decoded=parts[0], prompts=parts[1])
    assert (engine.batches, len(engine.launches)) == ([("mixed", [1, 8])], 1)
    assert engine.launches.using(decoded.table_id) == engine.launches.using(prompt_of_another.table_id)
    assert engine.launches.using(decoded.table_id) == [parts[0].output] == [parts[1].output]
    assert engine.launches.num_ready([4, 5, 6]) == 1
    engine.launches.collect_oldest()
    assert ended == parts and len(engine.launches) == 0
    assert engine.launches.num_ready([4, 5, 6]) == 3


def test_a_collected_forward_uses_its_pages_until_all_ranks_are_done(engine: FakeEngine) -> None:
    a, b = prompt(8, [0, 1], table_id=1), prompt(4, [2], table_id=2)
    first, second = Part([], {a: 8}), Part([], {b: 4})
    for part in (first, second):
        engine.launch(prompts=part)
    followers = ScriptedFollowers()
    for number, part in enumerate((first, second), 1):
        assert part.output is not None
        followers.must_complete(number, part.output)
    engine.launches.collect_all_but(0)
    assert engine.launches.is_lagging and engine.launches.using(a.table_id) == [first.output]
    assert engine.launches.num_ready([0, 1]) == engine.launches.num_ready([2]) == 0
    followers.num_completed = 1
    assert engine.launches.using(a.table_id) == [] and engine.launches.using(b.table_id) == [second.output]
    assert engine.launches.num_ready([0, 1]) == 2
    followers.num_completed = 2
    assert engine.launches.using(b.table_id) == [] and engine.launches.num_ready([2]) == 1
    # The caller last looked for freed pages before the end.
    assert engine.launches.is_lagging and not engine.launches.is_lagging


def test_nothing_lags_on_one_rank(engine: FakeEngine) -> None:
    engine.launch(prompts=Part([], {prompt(8, [0, 1]): 8}))
    engine.launches.collect_oldest()
    assert not engine.launches.is_lagging


class ScriptedFollowers:
    """Attributes: num_completed: forward passes that the slowest follower has completed."""

    def __init__(self) -> None:
        self.num_completed = 0

    def must_complete(self, number: int, output: ForwardOutput) -> None:
        done = output.done
        output.done = lambda: done() and self.num_completed >= number  # type: ignore[method-assign]
