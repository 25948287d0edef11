"""Records of forward passes, from the leader's batch to the follower's."""

from dataclasses import fields
from typing import cast

import numpy as np

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
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams

PAGE_SIZE = 4


class Line:
    """A recorder and a replay over one ring."""

    def __init__(self) -> None:
        ring = Ring(memoryview(bytearray(Ring.num_bytes(1))), 1, timeout_s=1.0)
        self.progress = Progress(memoryview(bytearray(Progress.num_bytes(2))), 2)
        self.recorder = ForwardRecorder(ring, self.progress, PAGE_SIZE)
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
    for field in fields(record):
        ours, theirs = getattr(record, field.name), getattr(decoded, field.name)
        if field.name == "scored":
            ours, theirs = ([(rows.tolist(), step) for rows, step in parts] for parts in (ours, theirs))
        if field.name == "updates":
            ours, theirs = ([numbers.tolist() for numbers in updates] for updates in (ours, theirs))
        if isinstance(ours, np.ndarray):
            ours, theirs = ours.tolist(), theirs.tolist()
        assert theirs == ours, field.name


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
    first.num_pending = 1
    second.token_ids.append(77)
    for s in (first, second):
        s.extend(1)
    feed = Feed(cast(ForwardOutput, None), [0, -1])
    check_equal(batch := Batch("decode", [first, second], feed), line.send(batch, 2))
    check_equal(batch := Batch.of([first, second], [late := sequence(11, 50, 4, num_new=3)], feed), line.send(batch, 2))
    assert late.cached_len == 4


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
    recorder = ForwardRecorder(Ring(memoryview(bytearray(Ring.num_bytes(2))), 2), progress, PAGE_SIZE)
    progress.complete_forward(RankConfig(1, 3), 4)
    assert recorder.num_completed() == 0
    progress.complete_forward(RankConfig(2, 3), 2)
    assert recorder.num_completed() == 2
