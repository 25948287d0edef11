import asyncio

import pytest

from tandem.messages import Recall, Recalled
from tandem.router import recalls
from tandem.router.errors import OverloadedError
from tandem.router.recalls import MAX_RECALLS, SETTLE_S, RecallResult
from tests.fakes.router_harness import RouterHarness, run, settle
from tests.fakes.scripted_worker import ScriptedWorker


def settled(num_prefill: int = 1, num_decode: int = 2) -> RouterHarness:
    h = RouterHarness(num_prefill, num_decode)
    h.clock.advance(SETTLE_S)
    return h


def answer(worker: ScriptedWorker, attempt: int = 0, *token_ids: int) -> Recalled:
    """Without tokens the worker has no record."""
    recall = worker.of(Recall)[-1]
    said = Recalled(recall.recall_id, attempt, token_ids, b"token" if token_ids else b"")
    worker.say(said)
    return said


@run
async def test_the_highest_attempt_counts_and_then_the_longest() -> None:
    h = settled(2, 3)
    asking = asyncio.create_task(h.router.recalls.recall("name"))
    await settle()
    workers = [*h.p, *h.d]
    assert [worker.of(Recall)[0].record_id for worker in workers] == ["name"] * 5
    answer(workers[0], 1, 7)
    answer(workers[1], 0, 7, 8, 9, 10)
    expected = answer(workers[2], 1, 7, 8, 11)
    answer(workers[3], 1, 7, 8)
    await settle()
    assert not asking.done(), "the last one may know more"
    answer(workers[4])
    assert await asking == RecallResult(expected, True)


@run
async def test_a_worker_that_is_lost_meanwhile_is_not_waited_for() -> None:
    h = settled()
    asking = asyncio.create_task(h.router.recalls.recall("name"))
    await settle()
    answer(h.p[0])
    answer(h.d[0])
    h.router.lose_worker(h.d[1].worker, "disconnected", "its process has ended")
    assert await asking == RecallResult(None, True)


@run
async def test_without_workers_nothing_is_known() -> None:
    h = settled(0, 0)
    assert await h.router.recalls.recall("name") == RecallResult(None, True)


def test_one_that_says_nothing_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalls, "RECALL_TIMEOUT_S", 0.1)

    @run
    async def scenario() -> None:
        h = settled()
        asking = asyncio.create_task(h.router.recalls.recall("name"))
        await settle()
        expected = answer(h.p[0], 0, 7)
        answer(h.d[0])
        assert await asking == RecallResult(expected, False)
        # Late and unrequested answers are ignored.
        answer(h.d[1], 3, 8)
        h.d[1].say(Recalled("made up", 3, (8,), b"token"))

    scenario()


@run
async def test_a_router_that_has_just_started_is_not_certain() -> None:
    h = RouterHarness()
    asking = asyncio.create_task(h.router.recalls.recall("name"))
    await settle()
    for worker in (*h.p, *h.d):
        answer(worker)
    assert await asking == RecallResult(None, False)


def test_no_more_than_so_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalls, "WAIT_TIMEOUT_S", 0.5)

    @run
    async def scenario() -> None:
        h = settled()
        asking = [asyncio.create_task(h.router.recalls.recall(f"name-{i}")) for i in range(MAX_RECALLS + 3)]
        await settle()
        assert len(h.p[0].of(Recall)) == MAX_RECALLS
        # Both a leaving client and an answer make room.
        asking[0].cancel()
        for worker in (*h.p, *h.d):
            worker.say(Recalled(worker.of(Recall)[1].recall_id))
        await settle()
        assert [recall.record_id for recall in h.p[0].of(Recall)[MAX_RECALLS:]] == [
            f"name-{MAX_RECALLS}",
            f"name-{MAX_RECALLS + 1}",
        ]
        with pytest.raises(OverloadedError):
            await asking[-1]
        for worker in (*h.p, *h.d):
            for recall in worker.of(Recall)[2:]:
                worker.say(Recalled(recall.recall_id))
        assert await asyncio.gather(*asking[1:-1]) == [RecallResult(None, True)] * (MAX_RECALLS + 1)

    scenario()
