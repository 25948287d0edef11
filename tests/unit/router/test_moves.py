"""Moves off leaving workers, with scripted workers."""

from typing import Any

import pytest

from tandem.messages import Abort, Admit, Finished, GaveBack, LeaseLost, Move, NotMoved, Prefill
from tandem.router.moves import ANSWER_S, MAX_AT_ONCE, MOVE_AGAIN_S
from tandem.router.observe.metrics import RouterMetrics
from tandem.router.workers.worker import Worker
from tests.fakes.router_harness import Client, RouterHarness, first_token, run, settle, step_tokens
from tests.fakes.scripted_worker import ScriptedWorker

PROMPT = tuple(range(10))
PLACES = {"b0": "both", "b1": "both", "b2": "both"}


class Moving(RouterHarness):
    """Three linked workers. Every request runs on the first one, unless it leaves."""

    def __init__(self, **config: Any) -> None:
        super().__init__(0, 0, **config)
        self.b = [ScriptedWorker(self.router, name, "both", has_links=True) for name in PLACES]
        for worker in self.b:
            worker.link_to(*(name for name in PLACES if name != worker.worker.worker_id))

    async def stream(self) -> Client:
        """A request that decodes on b0."""
        self.plan("b0")
        client = self.request(max_tokens=50, prompt_ids=PROMPT)
        await settle()
        request_id = client.tracker.request_id
        self.b[0].say(first_token(request_id, 0, 0, 10))
        self.b[0].say(step_tokens(request_id, 0, 0, 10, 11))
        self.plan(*PLACES)
        return client

    def plan(self, *names: str) -> dict[str, int]:
        return self.router.set_workers({name: PLACES[name] for name in names})

    def copies(self, number: int) -> list[Admit]:
        return [admit for admit in self.b[number].of(Admit) if admit.copy_of]

    def results(self) -> dict[str, int]:
        return {result: count for result, count in self.metrics._moves.items() if count}

    @property
    def metrics(self) -> RouterMetrics:
        return self.router.metrics


@run
async def test_streams_of_a_leaving_worker_move_and_stay_with_their_tokens() -> None:
    h = Moving()
    client = await h.stream()
    request_id = client.tracker.request_id
    h.plan("b1", "b2")
    (move,) = h.b[0].of(Move)
    there = h.b[int(move.decode_worker_id[1])]
    (ahead,) = there.of(Admit)
    # 12 tokens are known, and the last one's KV may be missing: two pages of 4.
    assert (move.request_id, move.attempt, move.num_tokens, move.copy_id) == (request_id, 0, 8, ahead.request_id)
    assert (ahead.copy_of, ahead.prompt_ids, ahead.record_id) == (request_id, PROMPT[:8], "")
    h.b[0].say(step_tokens(request_id, 0, 2, 12))
    h.b[0].say(GaveBack(request_id, 0, is_move=True))
    prefill = h.b[0].of(Prefill)[-1]
    assert (prefill.attempt, prefill.output_ids, prefill.is_move) == (1, (10, 11, 12), True)
    assert prefill.decode_worker_id == move.decode_worker_id and not there.of(Prefill)
    h.b[0].say(first_token(request_id, 1, 3, 13))
    there.say(step_tokens(request_id, 1, 3, 13, 14))
    assert h.results() == {"moved": 1} and h.plan("b1", "b2") == {"b0": 0}
    there.say(Finished(request_id, 1, "length", 5, 0, 1))
    await client.task
    assert client.tokens == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("reason", ["busy", "oldest"])
def test_a_refused_stream_stays_and_is_asked_again_later(reason: str) -> None:
    async def scenario() -> None:
        h = Moving()
        client = await h.stream()
        request_id = client.tracker.request_id
        h.plan("b1", "b2")
        h.b[0].say(NotMoved(request_id, 0, reason))
        h.b[0].say(step_tokens(request_id, 0, 2, 12))
        h.router.check_deadlines()
        assert len(h.b[0].of(Move)) == 1 and h.results() == {reason: 1}
        h.clock.advance(MOVE_AGAIN_S)
        for worker in h.b:
            h.router.workers.record_heard(worker.worker)
            worker.worker.last_progress = h.clock()
        h.router.check_deadlines()
        assert len(h.b[0].of(Move)) == 2
        h.b[0].say(Finished(request_id, 0, "length", 3, 0, 1))
        await client.task
        assert client.tokens == [10, 11, 12]

    run(scenario)()


@run
async def test_few_streams_leave_at_a_time() -> None:
    h = Moving()
    clients = [await h.stream() for _ in range(MAX_AT_ONCE + 2)]
    h.plan("b1", "b2")
    assert len(h.b[0].of(Move)) == MAX_AT_ONCE
    h.b[0].say(NotMoved(clients[0].tracker.request_id, 0, "oldest"))
    assert [move.request_id for move in h.b[0].of(Move)] == [c.tracker.request_id for c in clients[: MAX_AT_ONCE + 1]]
    for client in clients:
        await client.leave()
    assert h.results() == {"oldest": 1, "ended": MAX_AT_ONCE}


@run
async def test_without_a_place_or_when_staying_nothing_moves() -> None:
    h = Moving()
    client = await h.stream()
    for worker in (h.b[1], h.b[2]):
        h.router.lose_worker(worker.worker, "disconnected", "killed")
    h.plan("b1")
    assert not h.b[0].of(Move)
    await client.leave()


@run
async def test_given_back_stream_goes_anywhere_if_its_place_is_lost() -> None:
    h = Moving()
    client = await h.stream()
    request_id = client.tracker.request_id
    h.plan("b1", "b2")
    place = h.b[int(h.b[0].of(Move)[0].decode_worker_id[1])]
    other = h.b[3 - h.b.index(place)]
    h.router.lose_worker(place.worker, "disconnected", "killed")
    h.b[0].say(GaveBack(request_id, 0, is_move=True))
    (prefill,) = other.of(Prefill)
    assert (prefill.attempt, prefill.is_move, prefill.output_ids) == (1, False, (10, 11))
    assert h.results() == {"lost": 1}
    await client.leave()


@pytest.mark.parametrize("lost", [0, 1])
def test_death_of_either_worker_after_the_give_back_restarts_the_stream(lost: int) -> None:
    async def scenario() -> None:
        h = Moving()
        client = await h.stream()
        request_id = client.tracker.request_id
        h.plan("b1", "b2")
        place = h.b[int(h.b[0].of(Move)[0].decode_worker_id[1])]
        other = h.b[3 - h.b.index(place)]
        h.b[0].say(GaveBack(request_id, 0, is_move=True))
        dead: Worker = (h.b[0] if lost == 0 else place).worker
        h.router.lose_worker(dead, "disconnected", "killed")
        begun = [p for w in (other, place) for p in w.of(Prefill) if p.attempt == 2]
        assert len(begun) == 1 and not begun[0].is_move and begun[0].output_ids == (10, 11)
        await client.leave()
        assert h.results() == {"lost": 1}

    run(scenario)()


@run
async def test_answers_of_other_attempts_and_of_nobody_change_nothing() -> None:
    h = Moving()
    client = await h.stream()
    request_id = client.tracker.request_id
    h.plan("b1", "b2")
    (move,) = h.b[0].of(Move)
    h.b[0].say(NotMoved(request_id, 7, "busy"))
    # The other worker tells the end of a copy under the copy's own id.
    h.b[1].say(LeaseLost(move.copy_id, 0))
    assert not h.results() and not h.b[0].of(Abort)
    h.clock.advance(ANSWER_S)
    for worker in h.b:
        h.router.workers.record_heard(worker.worker)
        worker.worker.last_progress = h.clock()
    h.router.check_deadlines()
    assert h.results() == {"late": 1}
    await client.leave()
