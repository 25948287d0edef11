"""Records of forward passes, from the leader's batch to the follower's."""

import random
from typing import cast

import numpy as np
import pytest

from tandem.embedding import EmbeddingParams
from tandem.engine.attention.page_tables import new_positions
from tandem.engine.batch import Batch
from tandem.engine.kvcache.page_table import PageTable
from tandem.engine.output import Feed, ForwardOutput
from tandem.engine.prompt_logprobs import ScoredRows
from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.record import NO_GRAPH, ForwardRecord, GraphSize, TableUpdates
from tandem.engine.ranks.recorder import ForwardRecorder
from tandem.engine.ranks.replay import Replay, ReplayedBatch
from tandem.engine.ranks.ring import Ring
from tandem.engine.ranks.tables import MAX_COPIES
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams

PAGE_SIZE = 4


class Line:
    """A recorder and a replay over one ring."""

    def __init__(self, max_copies: int = MAX_COPIES) -> None:
        ring = Ring(memoryview(bytearray(Ring.num_bytes(1))), 1, timeout_s=1.0)
        self.progress = Progress(memoryview(bytearray(Progress.num_bytes(2))), 2)
        self.recorder = ForwardRecorder(ring, self.progress, PAGE_SIZE, max_copies)
        self.reader = ring.reader(1)
        self.replay = Replay()

    def send(self, batch: Batch, num_fed: int = 0, scored: tuple[ScoredRows, ...] = ()) -> ReplayedBatch:
        number = self.recorder.publish(batch, num_fed, NO_GRAPH, scored)
        message = self.reader.take()
        assert message is not None
        record = ForwardRecord.decode(message)
        assert record.number == number and record.num_fed == num_fed
        return self.replay.batch(record)


def sequence(
    length: int, first_page: int, cached_len: int = 0, num_new: int = 0, num_pending: int = 0
) -> TokenSequence:
    pages = PageTable(range(first_page, first_page - (-length // PAGE_SIZE)))
    made = TokenSequence(
        list(range(100, 100 + length - num_pending)), length, pages, cached_len, num_pending=num_pending
    )
    made.extend(num_new or made.remaining_len)
    return made


def check_equal(batch: Batch, replayed: ReplayedBatch) -> None:
    """All that an engine reads of a batch."""
    assert replayed.mode == batch.mode and replayed.num_mixed == batch.num_mixed
    assert (len(replayed.decoded), len(replayed.prompts)) == (len(batch.decoded), len(batch.prompts))
    for ours, theirs in zip(batch.sequences, replayed.sequences, strict=True):
        assert (theirs.cached_len, theirs.device_len) == (ours.cached_len, ours.device_len)
        num_pages = -(-ours.device_len // PAGE_SIZE)
        assert list(theirs.page_ids[:num_pages]) == list(ours.page_ids[:num_pages])
    assert replayed.known_ids() == batch.known_ids()
    assert replayed.logits_rows() == batch.logits_rows()
    assert replayed.pooled_rows() == batch.pooled_rows()
    assert replayed.scores_prompts == batch.scores_prompts
    assert replayed.needs_hidden_states == batch.needs_hidden_states
    assert replayed.num_tokens == batch.num_tokens
    assert replayed.fed_rows == (None if batch.fed_rows is None else list(batch.fed_rows))
    assert np.array_equal(new_positions(replayed.sequences), new_positions(batch.sequences))


def test_a_record_survives_its_encoding() -> None:
    copy_ids, cached_lens, device_lens, flags, fed_rows, new_ids = (
        np.array(values, np.int32) for values in ([3, 9], [7, 0], [6], [1], [4, -1], [5, 6, 7])
    )
    record = ForwardRecord(
        7,
        "mixed",
        1,
        GraphSize(16, 128),
        5,
        True,
        copy_ids,
        cached_lens,
        device_lens,
        flags,
        fed_rows,
        new_ids,
        TableUpdates(*(np.array(values, np.int32) for values in ([3, 9], [0, 2], [2, 1], [8, 9, 1]))),
        [ScoredRows(np.array([2, 3]), 8), ScoredRows(np.array([4]), 64)],
    )
    decoded = ForwardRecord.decode(record.encode())
    for name in record._fields:
        ours, theirs = getattr(record, name), getattr(decoded, name)
        if name == "scored":
            ours, theirs = ([(rows.tolist(), step) for rows, step in parts] for parts in (ours, theirs))
        if name == "updates":
            ours, theirs = ([numbers.tolist() for numbers in updates] for updates in (ours, theirs))
        if isinstance(ours, np.ndarray):
            ours, theirs = ours.tolist(), theirs.tolist()
        assert theirs == ours, name


def test_batches_of_all_kinds_arrive() -> None:
    line = Line()
    first, second = sequence(9, 0, num_new=5), sequence(6, 20)
    check_equal(batch := Batch("prefill", [first, second]), line.send(batch))
    for s in (first, second):
        s.complete_extend()
    scored, embedded = sequence(7, 30), sequence(5, 40)
    scored.sampling = SamplingParams(max_tokens=1, num_prompt_logprobs=2)
    embedded.embedding = EmbeddingParams()
    first.extend(4)
    rows = ScoredRows(np.array([4, 5, 6]), 64)
    replayed = line.send(batch := Batch("prefill", [first, scored, embedded]), scored=(rows,))
    check_equal(batch, replayed)
    assert [part.rows.tolist() for part in replayed.record.scored] == [[4, 5, 6]]
    first.complete_extend()
    first.token_ids.append(76)
    second.token_ids.append(77)
    for s in (first, second):
        s.extend(1)
    check_equal(batch := Batch("decode", [first]), line.send(batch))
    first.complete_extend()
    first.num_pending = 1
    first.extend(1)
    feed = Feed(cast(ForwardOutput, None), [-1, 0])
    check_equal(batch := Batch("decode", [second, first], feed), line.send(batch, 1))
    first.token_ids.append(78)
    for s in (first, second):
        s.complete_extend()
        s.num_pending = 1
        s.extend(1)
    feed = Feed(cast(ForwardOutput, None), [1, 0])
    check_equal(batch := Batch.of([first, second], [late := sequence(11, 50, 4, num_new=3)], feed), line.send(batch, 2))
    assert late.cached_len == 4


@pytest.mark.parametrize("max_copies", [8, 12, MAX_COPIES])
def test_sequences_that_come_and_go_arrive(max_copies: int) -> None:
    """The leader reads few of them: the others' states follow from the batch before."""
    chooser, line = random.Random(max_copies), Line(max_copies)
    waiting: list[TokenSequence] = []
    last: list[TokenSequence] = []
    for step in range(400):
        if len(waiting) < 6:
            length = chooser.randint(2, 9)
            waiting.append(sequence(length, 10 * step, length - 1))
        # Of the last batch, some end; of the waiting ones, some join. A sequence may pause for a step.
        going_on = [s for s in last if chooser.random() < 0.9]
        joining = [s for s in waiting if chooser.random() < 0.3][: 6 - len(going_on)]
        decoded = going_on + joining
        chooser.shuffle(decoded)
        for s in joining:
            waiting.remove(s)
        for s in decoded:
            table = s.page_ids
            assert isinstance(table, PageTable)
            if s.extend_len == 0:
                s.extend(1)
            table.extend(range(1000 + step, 1000 + step - (-s.device_len // PAGE_SIZE) - len(table)))
            if chooser.random() < 0.05:
                table.replace(0, 5000 + step)
        prompts = [sequence(chooser.randint(1, 9), 10 * step + 5) for _ in range(chooser.randint(0, 2))]
        if not decoded and not prompts:
            continue
        rows = [last.index(s) if s in going_on else -1 for s in decoded]
        feed = Feed(cast(ForwardOutput, None), rows) if max(rows, default=-1) >= 0 else None
        batch = Batch.of(decoded, prompts, feed)
        check_equal(batch, line.send(batch, len(last) if feed else 0))
        for s in decoded:
            s.complete_extend()
            s.num_pending = 1
        for s in last:
            if s not in decoded:
                # Its token is known once the step has ended.
                s.token_ids.append(step)
                s.num_pending = 0
                if chooser.random() < 0.5:
                    waiting.append(s)
        for s in going_on:
            s.token_ids.append(step)
        if decoded:
            last = decoded


def test_drafts_arrive() -> None:
    chooser, line = random.Random(4), Line()
    sequences = [sequence(length, 100 * length, length - 1) for length in (3, 8, 6)]
    for s in sequences:
        s.device_len = s.cached_len
    for step in range(60):
        num_accepted = []
        for s in sequences:
            s.draft_ids = chooser.choices(range(50), k=chooser.choice((0, 0, 1, 7)))
            s.extend(1 + len(s.draft_ids))
            table = s.page_ids
            assert isinstance(table, PageTable)
            table.extend(range(1000 + step, 1000 + step - (-s.device_len // PAGE_SIZE) - len(table)))
            num_accepted.append(chooser.randint(0, len(s.draft_ids)))
        batch = Batch("decode", sequences)
        replayed = line.send(batch)
        check_equal(batch, replayed)
        assert replayed.num_drafts == batch.num_drafts
        for s, num in zip(sequences, num_accepted, strict=True):
            s.complete_extend()
            s.accept_drafts(num)
            s.token_ids.extend(range(num + 1))


def test_only_new_page_ids_are_sent_and_replaced_ones_again() -> None:
    line = Line()
    grown = sequence(PAGE_SIZE, 0)
    table = grown.page_ids
    assert isinstance(table, PageTable)

    def sent() -> list[tuple[int, list[int]]]:
        batch = Batch("prefill" if grown.extend_len > 1 else "decode", [grown])
        replayed = line.send(batch)
        check_equal(batch, replayed)
        grown.complete_extend()
        grown.token_ids.append(1)
        grown.extend(1)
        _, firsts, _, page_ids = (numbers.tolist() for numbers in replayed.record.updates)
        return [(first, page_ids) for first in firsts]

    assert sent() == [(0, [0])]
    table.extend([5, 6])
    assert sent() == [(1, [5, 6])]
    assert sent() == []
    table.replace(0, 9)
    assert sent() == [(0, [9, 5, 6])]
    assert sent() == []


def test_a_leader_reports_the_slowest_follower() -> None:
    memory = bytearray(Progress.num_bytes(3))
    progress = Progress(memoryview(memory), 3)
    recorder = ForwardRecorder(Ring(memoryview(bytearray(Ring.num_bytes(2))), 2, 1.0), progress, PAGE_SIZE)
    progress.complete_forward(RankConfig(1, 3), 4)
    assert recorder.num_completed() == 0
    progress.complete_forward(RankConfig(2, 3), 2)
    assert recorder.num_completed() == 2
