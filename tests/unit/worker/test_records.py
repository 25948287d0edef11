import tracemalloc
from dataclasses import replace

import pytest

from tandem.messages import Admit, Failed, Finished, FirstToken, Prefill, Recall, Recalled, TokenEvent, Tokens
from tandem.sampling_params import SamplingParams
from tandem.worker.records import RECORD_BYTES, TOKEN_BYTES, RecordKeeper

NOTHING = Recalled("asked")


def admit(number: int, attempt: int = 0, output_ids: tuple[int, ...] = (), record_id: str | None = None) -> Admit:
    return Admit(
        f"request-{number}",
        attempt,
        (1, 2),
        output_ids,
        SamplingParams(100),
        1.0,
        record_id=f"record-{number}" if record_id is None else record_id,
        resume_token=b"token-%d" % number,
    )


def prefill(number: int, attempt: int = 0, output_ids: tuple[int, ...] = ()) -> Prefill:
    of = admit(number, attempt, output_ids)
    return Prefill(
        of.request_id,
        attempt,
        of.prompt_ids,
        output_ids,
        of.sampling,
        "d",
        record_id=of.record_id,
        resume_token=of.resume_token,
    )


def first(number: int, attempt: int, index: int, token_id: int) -> FirstToken:
    return FirstToken(f"request-{number}", attempt, index, token_id, "", 0, 1)


def tokens(number: int, attempt: int, index: int, *token_ids: int) -> TokenEvent:
    return TokenEvent(f"request-{number}", attempt, index, token_ids)


def kept(keeper: RecordKeeper, number: int) -> Recalled:
    return keeper.recall(Recall("asked", f"record-{number}"))


def test_decode_worker_keeps_sent_tokens() -> None:
    keeper = RecordKeeper(2**20)
    for number in (1, 2):
        keeper.begin(admit(number))
    keeper.note([Tokens((tokens(1, 0, 0, 5, 6), tokens(2, 0, 0, 7)))])
    keeper.note([Tokens((tokens(1, 0, 2, 8),)), Finished("request-1", 0, "length", 3, 0, 1)])
    assert kept(keeper, 1) == Recalled("asked", 0, (5, 6, 8), b"token-1")
    assert kept(keeper, 2) == Recalled("asked", 0, (7,), b"token-2")
    assert kept(keeper, 3) == NOTHING
    assert keeper.num_bytes == 2 * RECORD_BYTES + 4 * TOKEN_BYTES


def test_a_prefill_worker_keeps_the_first_token() -> None:
    keeper = RecordKeeper(2**20)
    keeper.begin(prefill(1, 2, (5, 6)))
    assert kept(keeper, 1) == Recalled("asked", 2, (5, 6), b"token-1"), "what was passed on before counts at once"
    keeper.note([first(1, 2, 2, 7)])
    assert kept(keeper, 1).token_ids == (5, 6, 7)


def test_a_worker_that_does_both_keeps_every_token_once() -> None:
    keeper = RecordKeeper(2**20)
    keeper.begin(admit(1))
    keeper.begin(prefill(1))
    keeper.note([first(1, 0, 0, 5)])
    keeper.note([Tokens((tokens(1, 0, 0, 5, 6),)), Tokens((tokens(1, 0, 2, 7),))])
    assert kept(keeper, 1).token_ids == (5, 6, 7)
    assert keeper.num_bytes == RECORD_BYTES + 3 * TOKEN_BYTES


def test_latest_attempt_counts_with_earlier_output() -> None:
    keeper = RecordKeeper(2**20)
    keeper.begin(admit(1))
    keeper.note([Tokens((tokens(1, 0, 0, 5, 6, 7),))])
    keeper.begin(admit(1, 1, (5, 6)))
    keeper.note([Tokens((tokens(1, 0, 2, 8),)), first(1, 0, 2, 8)])
    assert kept(keeper, 1) == Recalled("asked", 1, (5, 6), b"token-1")
    keeper.note([Tokens((tokens(1, 1, 2, 9),))])
    keeper.begin(admit(1))
    assert kept(keeper, 1).token_ids == (5, 6, 9), "what comes late of an earlier attempt changes nothing"
    assert len(keeper) == 1 and keeper.num_bytes == RECORD_BYTES + 3 * TOKEN_BYTES


@pytest.mark.parametrize("message", [admit(1, record_id=""), admit(1, output_ids=(5,), record_id="")])
def test_unrecallable_requests_are_not_kept(message: Admit) -> None:
    keeper = RecordKeeper(2**20)
    keeper.begin(message)
    keeper.begin(admit(2))
    keeper.note([Tokens((tokens(1, 0, len(message.output_ids), 6),)), first(1, 0, 0, 7), Failed("request-1", 0, "no")])
    assert len(keeper) == 1 and keeper.recall(Recall("asked", "")) == NOTHING


@pytest.mark.parametrize("num_each", [1, 10, 1000])
def test_oldest_records_are_evicted(num_each: int) -> None:
    max_bytes = 64 * 1024
    keeper = RecordKeeper(max_bytes)
    num_fitting = max_bytes // (RECORD_BYTES + TOKEN_BYTES * num_each)
    for number in range(200):
        keeper.begin(admit(number))
        for index in range(num_each):
            keeper.note([Tokens((tokens(number, 0, index, 5),))])
        assert keeper.num_bytes <= max_bytes
    found = [number for number in range(200) if kept(keeper, number) != NOTHING]
    assert found == list(range(200 - num_fitting, 200))
    # Requests of evicted records may still run.
    keeper.note([Tokens(tuple(tokens(number, 0, num_each, 6) for number in range(200)))])
    assert keeper.num_bytes <= max_bytes


def test_record_larger_than_the_limit() -> None:
    keeper = RecordKeeper(RECORD_BYTES + 10 * TOKEN_BYTES)
    keeper.begin(admit(1, 0, tuple(range(11))))
    assert (len(keeper), keeper.num_bytes) == (0, 0)
    keeper.begin(admit(2))
    for index in range(11):
        keeper.note([Tokens((tokens(2, 0, index, 5),))])
    assert (len(keeper), keeper.num_bytes) == (0, 0)


def test_num_bytes_matches_memory() -> None:
    keeper = RecordKeeper(2**19)
    tracemalloc.start()
    try:
        for number in range(800):
            message = replace(
                admit(number, record_id=f"{number:032x}"), request_id=f"{number:020x}", resume_token=bytes(450)
            )
            keeper.begin(message)
            for index in range(20):
                keeper.note([Tokens((TokenEvent(message.request_id, 0, index, (5,)),))])
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * 2**19 < taken < 1.2 * keeper.num_bytes <= 1.2 * 2**19
