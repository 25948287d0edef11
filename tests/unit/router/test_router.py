"""The router with scripted workers and an injected clock."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from router.access import Access
from router.config import RouterConfig
from router.errors import OverloadedError, RequestTimeoutError, RequestTooLargeError, UnavailableError
from router.frontends.generation import Generation
from router.output_text import OutputText
from router.policies.table import ROUTING_POLICIES
from router.router import Router
from router.tracker import RequestTracker
from tandem.lifecycle import RECEIVED
from tandem.messages import (
    Abort,
    Admit,
    Failed,
    Finished,
    FirstToken,
    GaveBack,
    Heartbeat,
    LeaseLost,
    LinkState,
    PageFormat,
    Peers,
    Prefill,
    TokenEvent,
    Tokens,
    Welcome,
)
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.tokenizer import ByteTokenizer


class Harness:
    def __init__(self, num_prefill: int = 1, num_decode: int = 1, routing: str = "least_loaded", **config: Any) -> None:
        self.clock = FakeClock()
        config = {"heartbeat_timeout_s": 1.0, "stall_timeout_s": 5.0, "max_attempts": 3, **config}
        self.router = Router(
            RouterConfig("nowhere", "fake", 400, **config), ROUTING_POLICIES.load(routing)(), self.clock
        )
        self.p = [ScriptedWorker(self.router, f"p{i}", "prefill") for i in range(num_prefill)]
        self.d = [ScriptedWorker(self.router, f"d{i}", "decode") for i in range(num_decode)]
        for worker in self.p:
            worker.link_to(*(f"d{i}" for i in range(num_decode)))

    def request(self, max_tokens: int = 5, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> "Client":
        tracker = self.router.track(prompt_ids, SamplingParams(max_tokens), moments={RECEIVED: 1})
        return Client(self.router, tracker)


class Client:
    """A client that reads all it can."""

    def __init__(self, router: Router, tracker: RequestTracker) -> None:
        self.tracker = tracker
        self.tokens: list[int] = []
        self.task = asyncio.create_task(self._read(router))

    async def _read(self, router: Router) -> None:
        output = OutputText(ByteTokenizer(), (), ())  # type: ignore[arg-type]
        with Generation(router, Access((), 0), "", self.tracker, output) as generation:
            while (piece := await generation.next()) is not None:
                self.tokens += piece.token_ids


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs an async test to its end, with a deadline."""

    def wrapper() -> None:
        async def with_deadline() -> None:
            async with asyncio.timeout(10):
                await test()

        asyncio.run(with_deadline())

    wrapper.__name__ = test.__name__
    wrapper.__doc__ = test.__doc__
    return wrapper


def first(request_id: str, attempt: int, index: int, token_id: int, reason: str = "") -> FirstToken:
    return FirstToken(request_id, attempt, index, token_id, reason, 0, 1)


def tokens(request_id: str, attempt: int, index: int, *token_ids: int) -> Tokens:
    return Tokens((TokenEvent(request_id, attempt, index, token_ids),))


@run
async def test_a_request_from_start_to_end() -> None:
    h = Harness()
    client = h.request()
    await settle()
    (admit,), (prefill,) = h.d[0].of(Admit), h.p[0].of(Prefill)
    assert (prefill.prompt_ids, prefill.decode_worker_id, prefill.attempt) == ((1, 2, 3), "d0", 0)
    assert admit.request_id == prefill.request_id
    h.p[0].say(first(admit.request_id, 0, 0, 10))
    await settle()
    assert client.tokens == [10]
    h.d[0].say(tokens(admit.request_id, 0, 0, 10, 11))
    h.d[0].say(Finished(admit.request_id, 0, "stop", 2, 0, 1))
    await client.task
    assert client.tokens == [10, 11] and client.tracker.finish_reason == "stop"
    assert h.router.num_requests == 0
    assert [w.num_assigned for w in h.router.workers] == [0, 0]
    assert not h.d[0].of(Abort) and not h.p[0].of(Abort)


@run
async def test_late_messages_of_a_finished_request_are_ignored() -> None:
    h = Harness()
    client = h.request(max_tokens=1)
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first(request_id, 0, 0, 10, "length"))
    h.d[0].say(tokens(request_id, 0, 0, 10, 11))
    h.d[0].say(Finished(request_id, 0, "stop", 2, 0, 1))
    await client.task
    h.d[0].say(LeaseLost(request_id, 0))
    assert client.tokens == [10]
    assert [w.num_assigned for w in h.router.workers] == [0, 0]


@run
async def test_a_client_that_leaves_ends_the_attempt_on_both_workers() -> None:
    h = Harness()
    client = h.request()
    await settle()
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
    for worker in (h.p[0], h.d[0]):
        assert worker.of(Abort) == [Abort(client.tracker.request_id, 0)]
    assert h.router.num_requests == 0
    assert [w.num_assigned for w in h.router.workers] == [0, 0]


@run
async def test_ids_are_never_used_twice_even_across_restarts() -> None:
    routers = [Harness().router, Harness().router] * 3
    ids = {router.track((1,), SamplingParams(1), moments={}).request_id for router in routers}
    assert len(ids) == 6


@run
async def test_nobody_to_serve_is_said_at_once() -> None:
    for h, reason in (
        (Harness(0, 0), "no prefill and no decode worker"),
        (Harness(1, 0), "no decode worker"),
        (Harness(0, 1), "no prefill worker"),
    ):
        with pytest.raises(UnavailableError, match=reason):
            await h.request().task
    h = Harness(0, 1)
    ScriptedWorker(h.router, "p0", "prefill")  # joined, but without a link yet
    with pytest.raises(UnavailableError, match="no prefill worker has a link"):
        await h.request().task


@run
async def test_why_there_is_no_link_is_said() -> None:
    h = Harness(0, 1)
    p = ScriptedWorker(h.router, "p0", "prefill")
    no_link = "no prefill worker has a link to a decode worker"
    assert h.router.not_ready_reason() == f"{no_link} yet"
    p.say(LinkState("d0", "d0-life", up=False, reason="cannot be mapped"))
    assert h.router.not_ready_reason() == f"{no_link}: p0 to d0: cannot be mapped"
    with pytest.raises(UnavailableError, match="p0 to d0: cannot be mapped"):
        await h.request().task
    p.link_to("d0")
    assert h.router.not_ready_reason() == ""
    # The last reason counts, not one from before the link was up.
    p.say(LinkState("d0", "d0-life", up=False, reason="the stream ended"))
    assert h.router.not_ready_reason() == f"{no_link}: p0 to d0: the stream ended"
    # What was said of an earlier life of the decode worker says nothing about this one.
    h.router.lose(h.d[0].worker, "silent", "gone")
    ScriptedWorker(h.router, "d0", "decode", life="next-life")
    p.say(LinkState("d0", "d0-life", up=False, reason="late word of the earlier life"))
    assert h.router.not_ready_reason() == f"{no_link} yet"


@run
async def test_a_request_too_large_for_the_pools_is_refused_at_the_door() -> None:
    h = Harness()
    with pytest.raises(RequestTooLargeError, match="3 prompt tokens and 398 output tokens do not fit"):
        await h.request(max_tokens=398).task
    assert not h.p[0].of(Prefill)


@pytest.mark.parametrize("end", [GaveBack, LeaseLost])
def test_an_attempt_that_ends_is_started_again_with_what_was_passed_on(end: type) -> None:
    async def scenario() -> None:
        h = Harness()
        client = h.request()
        await settle()
        request_id = client.tracker.request_id
        h.p[0].say(first(request_id, 0, 0, 10))
        h.d[0].say(tokens(request_id, 0, 0, 10, 11))
        h.d[0].say(end(request_id, 0))
        again = h.p[0].of(Prefill)[1]
        assert (again.attempt, again.prompt_ids, again.output_ids) == (1, (1, 2, 3), (10, 11))
        assert h.p[0].of(Abort) == [Abort(request_id, 0)]
        h.d[0].say(tokens(request_id, 0, 2, 99))  # of the old attempt
        h.p[0].say(first(request_id, 1, 2, 12))
        h.d[0].say(tokens(request_id, 1, 2, 12, 13))
        h.d[0].say(Finished(request_id, 1, "length", 4, 0, 1))
        await client.task
        assert client.tokens == [10, 11, 12, 13]

    run(scenario)()


@run
async def test_a_lost_worker_s_requests_go_on_elsewhere() -> None:
    h = Harness(1, 2)
    client = h.request()
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first(request_id, 0, 0, 10))
    h.router.lose(h.d[0].worker, "disconnected", "killed")
    assert h.d[0].disconnected == "killed"
    assert h.p[0].of(Prefill)[1].decode_worker_id == "d1"
    h.d[1].say(tokens(request_id, 1, 1, 11))
    h.p[0].say(first(request_id, 1, 1, 11))
    h.d[1].say(Finished(request_id, 1, "stop", 2, 0, 1))
    await client.task
    assert client.tokens == [10, 11]


@run
async def test_the_last_worker_s_loss_fails_its_requests_clearly() -> None:
    h = Harness()
    client = h.request()
    await settle()
    h.router.lose(h.d[0].worker, "disconnected", "killed")
    with pytest.raises(UnavailableError, match="no decode worker is connected"):
        await client.task
    assert h.p[0].of(Abort)


@run
async def test_attempts_are_bounded() -> None:
    h = Harness()
    client = h.request()
    await settle()
    for attempt in range(3):
        h.p[0].say(Failed(client.tracker.request_id, attempt, "no luck", retryable=True))
    with pytest.raises(UnavailableError, match="given up after 3 failed attempts"):
        await client.task


@run
async def test_a_worker_lost_between_the_last_token_and_its_finish_loses_nothing() -> None:
    h = Harness(1, 2)
    client = h.request(max_tokens=2)
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first(request_id, 0, 0, 10))
    h.d[0].say(tokens(request_id, 0, 0, 10, 11))
    h.router.lose(h.d[0].worker, "disconnected", "killed")
    await client.task
    assert (client.tokens, client.tracker.finish_reason) == ([10, 11], "length")
    assert len(h.p[0].of(Prefill)) == 1
    assert [w.num_assigned for w in h.router.workers] == [0, 0]


@run
async def test_being_given_back_is_no_failure() -> None:
    h = Harness()
    client = h.request()
    await settle()
    for attempt in range(10):
        h.d[0].say(GaveBack(client.tracker.request_id, attempt))
    assert len(h.p[0].of(Prefill)) == 11 and not client.task.done()
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)


@run
async def test_silence_and_standstill_lose_a_worker() -> None:
    h = Harness(1, 2)
    h.clock.advance(0.9)
    for worker in (*h.p, *h.d):
        worker.say(Heartbeat(1))
    h.clock.advance(0.9)
    for worker in (h.p[0], h.d[0]):
        worker.say(Heartbeat(2))
    h.clock.advance(0.2)
    assert [(w.worker_id, *why) for w, *why in h.router.workers.lost()] == [("d1", "silent", "no heartbeat for 1 s")]
    # Whatever a worker says, it is not silent.
    h.clock.advance(0.9)
    h.d[1].say(Tokens(()))
    for worker in (h.p[0], h.d[0]):
        worker.say(Heartbeat(2))
    h.clock.advance(0.2)
    assert not h.router.workers.lost()
    # A worker that talks but does not move.
    for _ in range(6):
        h.clock.advance(0.9)
        h.p[0].say(Heartbeat(3))
        h.d[0].say(Heartbeat(2))
        h.d[1].say(Heartbeat(9))
    assert [(w.worker_id, *why) for w, *why in h.router.workers.lost()] == [
        ("d0", "stalled", "no scheduler step for 5 s")
    ]


@run
async def test_a_router_that_stood_still_does_not_blame_its_workers() -> None:
    h = Harness()
    h.clock.advance(10)
    h.router.check_deadlines(stood_still_s=9.8)
    assert len(list(h.router.workers)) == 2
    h.clock.advance(10)
    h.router.check_deadlines()
    assert not list(h.router.workers)


@run
async def test_a_worker_that_connects_again_replaces_itself() -> None:
    h = Harness()
    client = h.request()
    await settle()
    again = ScriptedWorker(h.router, "d0", "decode")
    assert h.d[0].disconnected == "it has connected again"
    assert isinstance(again.sent[0], Welcome)
    # The prefill worker's link was to the old life: it is not used until it says that the new one is up.
    with pytest.raises(UnavailableError):
        await client.task
    assert h.p[0].of(Peers)[-1].decode_workers[0].worker_id == "d0"


@run
async def test_workers_whose_pages_differ_cannot_join() -> None:
    h = Harness()
    with pytest.raises(ValueError, match="pages differ"):
        ScriptedWorker(h.router, "d9", "decode", page_format=PageFormat("other", 1, 4, 1, 1, "float32"))
    assert h.router.workers.get("d9") is None
    # Nor drive out the one whose name they take.
    with pytest.raises(ValueError, match="pages differ"):
        ScriptedWorker(h.router, "d0", "decode", page_format=PageFormat("other", 1, 4, 1, 1, "float32"))
    assert h.router.workers.get("d0") is h.d[0].worker


@run
async def test_requests_spread_over_the_pairs() -> None:
    h = Harness(2, 2)
    clients = [h.request() for _ in range(8)]
    await settle()
    assert [len(w.of(Prefill)) for w in h.p] == [4, 4]
    assert [len(w.of(Admit)) for w in h.d] == [4, 4]
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(c.task for c in clients), return_exceptions=True)


@run
async def test_a_combined_worker_is_a_pair_of_its_own() -> None:
    h = Harness(0, 0)
    both = ScriptedWorker(h.router, "b", "both")
    client = h.request()
    await settle()
    assert [type(m) for m in both.sent] == [Welcome, Admit, Prefill]
    assert both.worker.num_assigned == 1
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
    assert both.worker.num_assigned == 0
    assert len(both.of(Abort)) == 1


@run
async def test_a_prefill_worker_s_death_does_not_matter_once_decode_has_spoken() -> None:
    h = Harness(2, 1)
    client = h.request()
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first(request_id, 0, 0, 10))
    h.d[0].say(tokens(request_id, 0, 0, 10, 11))
    assert h.p[0].worker.num_assigned == 0
    h.router.lose(h.p[0].worker, "disconnected", "killed")
    h.d[0].say(tokens(request_id, 0, 2, 12))
    h.d[0].say(Finished(request_id, 0, "stop", 3, 0, 1))
    await client.task
    assert client.tokens == [10, 11, 12] and not h.p[1].of(Prefill)


@run
async def test_after_the_first_token_the_decode_worker_is_asked_by_waiting() -> None:
    h = Harness(2, 1, decode_word_timeout_s=0.5)
    client = h.request()
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first(request_id, 0, 0, 10))
    h.router.lose(h.p[0].worker, "disconnected", "killed")
    assert not h.p[1].of(Prefill), "the decode worker may have the pages"
    h.d[0].say(tokens(request_id, 0, 0, 10, 11))
    h.clock.advance(0.9)
    h.d[0].say(Heartbeat(1))
    h.p[1].say(Heartbeat(1))
    h.router.check_deadlines()
    h.d[0].say(Finished(request_id, 0, "stop", 2, 0, 1))
    await client.task
    assert client.tokens == [10, 11]


@pytest.mark.parametrize("says_lost", [True, False])
def test_after_the_first_token_lost_pages_mean_another_attempt(says_lost: bool) -> None:
    async def scenario() -> None:
        h = Harness(2, 1, decode_word_timeout_s=0.5)
        client = h.request()
        await settle()
        request_id = client.tracker.request_id
        h.p[0].say(first(request_id, 0, 0, 10))
        h.router.lose(h.p[0].worker, "disconnected", "killed")
        if says_lost:
            h.d[0].say(LeaseLost(request_id, 0))
        else:
            h.clock.advance(0.6)
            h.router.check_deadlines()
        (again,) = h.p[1].of(Prefill)
        assert (again.attempt, again.output_ids) == (1, (10,))
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        assert [w.num_assigned for w in h.router.workers] == [0, 0]
        assert [w.num_pending_tokens for w in h.router.workers] == [0, 0]

    run(scenario)()


@run
async def test_overload_is_said_at_once_and_hurts_nobody_in_hand() -> None:
    h = Harness(max_queued_requests=2)
    clients = [h.request() for _ in range(2)]
    await settle()
    with pytest.raises(OverloadedError, match="2 requests wait for their first token"):
        await h.request().task
    # A request that has its first token waits no more.
    h.p[0].say(first(clients[0].tracker.request_id, 0, 0, 10))
    await settle()
    third = h.request()
    await settle()
    assert not third.task.done()
    for client in (*clients, third):
        client.task.cancel()
    await asyncio.gather(*(c.task for c in (*clients, third)), return_exceptions=True)
    assert h.router.num_queued == 0


@run
async def test_a_request_that_takes_too_long_is_given_up_on_both_workers() -> None:
    h = Harness(request_timeout_s=30)
    client = h.request()
    await settle()
    h.clock.advance(31)
    for worker in (*h.p, *h.d):
        worker.say(Heartbeat(1))
    h.router.check_deadlines()
    with pytest.raises(RequestTimeoutError, match="not finished within 30 s"):
        await client.task
    for worker in (h.p[0], h.d[0]):
        assert worker.of(Abort) == [Abort(client.tracker.request_id, 0)]


@run
async def test_what_a_request_carries_reaches_both_workers_on_every_attempt() -> None:
    h = Harness()
    tracker = h.router.track(
        (1, 2, 3), SamplingParams(5, seed=9), priority=4, cache_namespace="tenant", moments={RECEIVED: 77}
    )
    client = Client(h.router, tracker)
    await settle()
    h.d[0].say(GaveBack(tracker.request_id, 0))
    for message in (*h.d[0].of(Admit), *h.p[0].of(Prefill)):
        assert (message.priority, message.cache_namespace, message.arrival_ns) == (4, "tenant", 77)
        assert message.sampling == SamplingParams(5, seed=9)
    assert len(h.d[0].of(Admit)) == 2
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
