"""Times and outcomes of requests, in virtual time."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.bench.clients.base import Answer, BenchClient, Clock, RequestError, ServerDescription
from tandem.bench.records import RequestRecord
from tandem.bench.runner import Runner, RunnerConfig
from tandem.bench.workloads.base import PromptPart, Session, Turn, numbered
from tests.fakes import virtual_time
from tests.fakes.virtual_time import hold_up


class FakeClient(BenchClient):
    """Answers after a delay with the tokens 0, 1, ... of the wanted number.

    Attributes:
        prompts: of all requests so far.
        most_at_once: maximum requests in flight.
    """

    def __init__(self, delay_s: float = 0.01, *, tells_ids: bool = True) -> None:
        self._delay_s = delay_s
        self._tells_ids = tells_ids
        self._in_hand = 0
        self.prompts: list[list[PromptPart]] = []
        self.most_at_once = 0
        self.error: RequestError | None = None
        self.num_missing = 0

    async def open(self) -> ServerDescription:
        return ServerDescription("fake")

    def prepare(self, parts: Sequence[PromptPart], num_output_tokens: int) -> Any:
        return list(parts), num_output_tokens

    async def send(self, prepared: Any, record: RequestRecord, clock: Clock) -> Answer:
        parts, num_tokens = prepared
        record.sent_s = clock()
        self.prompts.append(parts)
        self._in_hand += 1
        self.most_at_once = max(self.most_at_once, self._in_hand)
        try:
            await asyncio.sleep(self._delay_s)
            if self.error is not None:
                raise self.error
            token_ids = array("I", range(num_tokens - self.num_missing))
            record.num_output_tokens = len(token_ids)
            record.times.append(clock())
            return Answer(token_ids if self._tells_ids else None, f"answer {len(self.prompts)}")
        finally:
            self._in_hand -= 1

    async def close(self) -> None: ...


def part(*token_ids: int) -> PromptPart:
    return PromptPart("user", len(token_ids), array("I", token_ids))


def single(index: int, due_s: float | None = None) -> Session:
    return Session(index, (Turn((part(index),), 2),), due_s=due_s)


def make_runner(sessions: Sequence[Session], client: BenchClient, **config: Any) -> Runner:
    start = virtual_time.now() + 0.02
    return Runner(sessions, client, RunnerConfig(**config), lambda: virtual_time.now() - start)


def run(sessions: Sequence[Session], client: BenchClient, **config: Any) -> list[RequestRecord]:
    async def main() -> list[RequestRecord]:
        runner = make_runner(sessions, client, **config)
        await runner.run()
        return runner.records

    return virtual_time.run(main())


def test_open_arrivals_leave_on_time() -> None:
    due = [0.0, 0.02, 0.05, 0.05]
    records = run([single(n, moment) for n, moment in enumerate(due)], FakeClient(0.2))
    assert [record.due_s for record in records] == due
    assert all(0 <= record.lateness_s < 0.001 for record in records)
    assert max(record.sent_s for record in records) < min(record.ended_s for record in records)


def test_late_request_is_counted_from_its_actual_start() -> None:
    """A delayed client does not shift the arrivals."""

    class Slow(FakeClient):
        async def send(self, prepared: Any, record: RequestRecord, clock: Clock) -> Answer:
            if record.index == 0:
                hold_up(0.1)
            return await super().send(prepared, record, clock)

    first, second = run([single(0, 0.0), single(1, 0.03)], Slow())
    assert second.due_s == 0.03 and second.lateness_s > 0.05
    assert second.times[0] - second.due_s > 0.05 > second.times[0] - second.sent_s
    assert first.lateness_s >= 0.1


def test_closed_arrivals_keep_the_concurrency() -> None:
    client = FakeClient()
    records = run([single(n) for n in range(10)], client, concurrency=3)
    assert client.most_at_once == 3
    assert sorted(record.index for record in records) == list(range(10))


def test_nothing_begins_after_the_duration() -> None:
    assert len(run([single(n) for n in range(1000)], FakeClient(0.02), duration_s=0.1)) < 20
    assert len(run([single(n, n * 0.05) for n in range(10)], FakeClient(), duration_s=0.12)) == 3


@pytest.mark.parametrize("tells_ids", [True, False])
def test_a_turn_leaves_after_the_answer_and_repeats_it(tells_ids: bool) -> None:
    stand_in = PromptPart("assistant", 2, array("I", [90, 91]))
    turns = [Turn((part(7),), 2, stand_in), Turn((part(8),), 2, stand_in, 0.03), Turn((part(9),), 1)]
    client = FakeClient(tells_ids=tells_ids)
    first, second, third = run(numbered([turns]), client)
    answer = [0, 1] if tells_ids else [90, 91]
    assert [[token for p in prompt for token in p.token_ids or ()] for prompt in client.prompts] == [
        [7],
        [7, *answer, 8],
        [7, *answer, 8, *answer, 9],
    ]
    assert [p.role for p in client.prompts[2]] == ["user", "assistant", "user", "assistant", "user"]
    assert second.due_s == pytest.approx(first.ended_s + 0.03) and second.sent_s >= second.due_s
    assert [first.wanted_input_tokens, third.wanted_input_tokens] == [1, 7]


def test_texts_are_gone_on_with_as_texts() -> None:
    question = PromptPart("user", 1, text="why")
    client = FakeClient()
    run(numbered([[Turn((question,), 2, PromptPart("assistant", 2, text="-")), Turn((question,), 2)]]), client)
    assert [p.text for p in client.prompts[1]] == ["why", "answer 1", "why"]


def test_failed_turn_ends_the_session() -> None:
    client = FakeClient()
    client.error = RequestError("refused", "a full queue")
    turns = [Turn((part(1),), 2, part(0)), Turn((part(2),), 2)]
    [record] = run(numbered([turns]), client)
    assert (record.error, record.detail) == ("refused", "a full queue") and record.ended_s > 0


def test_short_output_with_ignore_eos_is_an_error() -> None:
    client = FakeClient()
    client.num_missing = 1
    assert [record.error for record in run([single(0)], client)] == ["too_short"]
    assert [record.error for record in run([single(0)], client, ignore_eos=False)] == [""]


@pytest.mark.parametrize("tells_ids", [True, False])
def test_equal_answers_have_equal_digests(tells_ids: bool) -> None:
    one, other, lost = FakeClient(tells_ids=tells_ids), FakeClient(tells_ids=tells_ids), FakeClient()
    other.num_missing = 1
    lost.error = RequestError("failed", "x")
    digests = [run([single(0)], client)[0].output_digest for client in (one, FakeClient(tells_ids=tells_ids), other)]
    assert digests[0] == digests[1] != "" and (digests[0] != digests[2]) == tells_ids
    assert run([single(0)], lost)[0].output_digest == ""


def test_early_requests_are_warmup() -> None:
    by_number = run([single(n) for n in range(4)], FakeClient(), warmup_requests=2)
    assert [record.is_warmup for record in by_number] == [True, True, False, False]
    by_time = run([single(n, n * 0.02) for n in range(4)], FakeClient(), warmup_s=0.03)
    assert [record.is_warmup for record in by_time] == [True, True, False, False]


def test_spread_stream_starts_with_its_remainder() -> None:
    async def main() -> list[RequestRecord]:
        midway = Turn((part(1, 2, 3, 4, 5),), 1)
        stream = Session(0, (Turn((part(1),), 2),), "streams", begins_with=midway)
        runner = make_runner([stream, single(0, 0.1)], FakeClient(0.01))
        running = asyncio.create_task(runner.run())
        while not runner.progress().arrivals_over:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        runner.cut_streams()
        await asyncio.wait_for(running, 5)
        return [record for record in runner.records if record.group == "streams"]

    first, second, *_ = virtual_time.run(main())
    assert (first.wanted_input_tokens, first.wanted_output_tokens) == (5, 1)
    assert (second.wanted_input_tokens, second.wanted_output_tokens) == (1, 2)


def test_streams_go_on_until_they_are_cut() -> None:
    async def main() -> list[RequestRecord]:
        stream = Session(0, (Turn((part(1),), 2),), "streams")
        runner = make_runner([stream, single(0, 0.1)], FakeClient(0.03), warmup_requests=5)
        running = asyncio.create_task(runner.run())
        while not runner.progress().arrivals_over:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not running.done()
        runner.cut_streams()
        await asyncio.wait_for(running, 5)
        return runner.records

    records = virtual_time.run(main())
    streams = [record for record in records if record.group == "streams"]
    assert len(streams) > 1 and not any(record.is_warmup for record in streams)
    assert {record.error for record in streams[:-1]} == {""} and streams[-1].error in ("", "cut")


def test_stopped_run_keeps_its_measurements() -> None:
    async def main() -> Runner:
        runner = make_runner([single(0, 0.0), single(1, 0.01), single(2, 60.0)], FakeClient(30.0))
        running = asyncio.create_task(runner.run())
        while runner.progress().num_sent < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running], timeout=5)
        assert running.done()
        return runner

    runner = virtual_time.run(main())
    assert [record.error for record in runner.records] == ["cut", "cut"]
    assert runner.progress().num_ended == 2 and runner.progress().num_failed == 0


class SlowToEncode(FakeClient):
    num_prepared = 0

    def prepare(self, parts: Sequence[PromptPart], num_output_tokens: int) -> Any:
        self.num_prepared += 1
        hold_up(0.03)
        return super().prepare(parts, num_output_tokens)


def test_first_requests_are_encoded_before_the_start() -> None:
    """Otherwise the first arrivals would be late, and their TTFT the client's own."""
    client = SlowToEncode()

    async def main() -> None:
        runner = make_runner([single(n, 0.5) for n in range(5)] + [single(n) for n in range(5)], client, concurrency=2)
        assert client.num_prepared == 10
        await runner.run()
        assert client.num_prepared == 10 and len(runner.records) == 10

    virtual_time.run(main())


def test_encoding_the_next_turn_is_not_the_servers_time() -> None:
    turns = [Turn((part(1),), 2, part(0)), Turn((part(2),), 2)]
    _, second = run(numbered([turns]), SlowToEncode())
    assert second.lateness_s < 0.001


def test_no_turn_begins_after_the_duration() -> None:
    turns = [Turn((part(1),), 2, part(0)), Turn((part(2),), 2, part(0), think_s=0.05), Turn((part(3),), 2, think_s=5.0)]
    assert len(run(numbered([turns]), FakeClient(), duration_s=0.5)) == 2


def test_unreadable_answer_fails_only_its_request() -> None:
    class Confused(FakeClient):
        async def send(self, prepared: Any, record: RequestRecord, clock: Clock) -> Answer:
            if record.index == 1:
                raise UnicodeError("what is this")
            return await super().send(prepared, record, clock)

    records = run([single(n, 0.0) for n in range(3)], Confused())
    assert [record.error for record in records] == ["", "failed", ""] and "what is this" in records[1].detail
