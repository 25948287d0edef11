"""Requests whose prompt is only embedded: by a prefill worker alone, over scripted workers."""

import pytest

from tandem.embedding import EmbeddingParams
from tandem.messages import Abort, Admit, Embedded, Failed, Moment, Prefill
from tandem.router.errors import InternalError, OverloadedError, RequestTooLargeError, UnavailableError
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.waiting_room import MAX_STARTING, SUSPECT_REST_S
from tests.fakes.router_harness import Client, RouterHarness, first_token, run, settle
from tests.fakes.scripted_worker import ScriptedWorker

VALUES = b"\0\0\x80?"


def embed(h: RouterHarness, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> Client:
    return h.request(prompt_ids=prompt_ids, embedding=EmbeddingParams())


def answer(worker: ScriptedWorker, client: Client, cached_len: int = 0) -> None:
    now = 5
    moments = (Moment("prefill_started", now), Moment("first_token", now))
    worker.say(Embedded(client.tracker.request_id, client.tracker.attempt, VALUES, cached_len, 1, moments))


def is_idle(h: RouterHarness) -> bool:
    loads = [
        (w.num_assigned, w.num_pending_tokens, w.num_decoding, w.num_kv_tokens, w.num_arriving_tokens, w.num_starting)
        for w in h.router.workers
    ]
    return h.router.num_requests == h.router.num_queued == 0 and set(loads) <= {(0,) * 6}


@run
async def test_a_prefill_worker_alone_serves_it() -> None:
    h = RouterHarness(num_prefill=1, num_decode=0)
    assert h.router.not_ready_reason() == "no decode worker is connected", "for requests with an output"
    client = embed(h)
    await settle()
    [prefill] = h.p[0].of(Prefill)
    assert (prefill.prompt_ids, prefill.decode_worker_id, prefill.embedding) == ((1, 2, 3), "", EmbeddingParams())
    worker = h.p[0].worker
    assert (worker.num_assigned, worker.num_pending_tokens, worker.num_decoding, worker.num_kv_tokens) == (1, 3, 0, 0)
    assert h.router.num_queued == 1
    answer(h.p[0], client, cached_len=2)
    await client.task
    tracker = client.tracker
    assert (tracker.embedding, tracker.finish_reason, tracker.prompt_cached_len) == (VALUES, "embedded", 2)
    assert not client.tokens and not h.p[0].of(Abort) and is_idle(h)
    text = h.router.metrics.exposition().decode()
    assert 'tandem_requests_total{outcome="embedded"} 1.0' in text
    assert "tandem_prompt_tokens_total 3.0" in text and "tandem_ttft_seconds_count 0" in text
    assert "tandem_request_generated_tokens_count 0" in text and 'placement="aggregated",reason="none"} 0.0' in text


@run
async def test_decode_workers_get_none() -> None:
    h = RouterHarness(num_prefill=1, num_decode=1)
    clients = [embed(h) for _ in range(3)]
    await settle()
    assert len(h.p[0].of(Prefill)) == 3 and not h.d[0].of(Admit)
    for client in clients:
        answer(h.p[0], client)
        await client.task
    assert is_idle(h)


@pytest.mark.parametrize("routing", sorted(ROUTING_POLICIES.names))
def test_every_policy_spreads_them_over_prefill_workers(routing: str) -> None:
    @run
    async def test() -> None:
        h = RouterHarness(num_prefill=2, num_decode=1, routing=routing)
        both = ScriptedWorker(h.router, "b0", "both")
        clients = [embed(h, tuple(range(100 * i, 100 * i + 20))) for i in range(30)]
        await settle()
        for worker in (*h.p, both):
            assert len(worker.of(Prefill)) >= 2
        assert not h.d[0].of(Admit)
        for client in clients:
            [worker] = [w for w in (*h.p, both) if client.tracker.request_id in [m.request_id for m in w.of(Prefill)]]
            answer(worker, client)
            await client.task
        assert is_idle(h)

    test()


@run
async def test_the_loss_of_its_worker_starts_another_attempt() -> None:
    h = RouterHarness(num_prefill=2, num_decode=1)
    client = embed(h)
    await settle()
    [first] = [w for w in h.p if w.of(Prefill)]
    [second] = [w for w in h.p if w is not first]
    h.router.lose_worker(first.worker, "disconnected", "killed")
    await settle()
    [prefill] = second.of(Prefill)
    assert (prefill.attempt, prefill.embedding) == (1, EmbeddingParams())
    # A late answer of the first attempt has no effect.
    second.say(Embedded(client.tracker.request_id, 0, b"old!", 0, 1))
    assert not client.task.done()
    answer(second, client)
    await client.task
    assert client.tracker.embedding == VALUES and client.tracker.attempt == 1 and is_idle(h)


@run
async def test_it_waits_for_a_prefill_worker() -> None:
    h = RouterHarness(num_prefill=1, num_decode=1)
    h.router.lose_worker(h.p[0].worker, "disconnected", "killed")
    client = embed(h)
    await settle()
    assert h.router.num_waiting == 1 and not h.d[0].of(Admit)
    # It needs no link.
    back = ScriptedWorker(h.router, "p0", "prefill", life="second")
    await settle()
    assert h.router.num_waiting == 0 and len(back.of(Prefill)) == 1
    answer(back, client)
    await client.task
    assert is_idle(h)


@run
async def test_waiting_requests_with_an_output_do_not_hold_it_up() -> None:
    h = RouterHarness(num_prefill=1, num_decode=0)
    generating = [h.request() for _ in range(3)]
    await settle()
    assert h.router.num_waiting == 3
    client = embed(h)
    await settle()
    assert h.router.num_waiting == 3
    answer(h.p[0], client)
    await client.task
    for other in generating:
        await other.leave()
    assert is_idle(h)


@run
async def test_the_oldest_goes_first_of_both_kinds() -> None:
    h = RouterHarness(num_prefill=0, num_decode=1)
    clients = [h.request() if number % 2 else embed(h) for number in range(2 * MAX_STARTING)]
    await settle()
    assert h.router.num_waiting == len(clients)
    back = ScriptedWorker(h.router, "p0", "prefill")
    back.link_to("d0")
    await settle()
    started = [m.request_id for m in back.of(Prefill)]
    embedded = [c.tracker.request_id for c in clients[::2]]
    # Those to embed need no link, so they take the worker's places until it has one.
    assert started == embedded[:MAX_STARTING]
    for client in clients:
        await client.leave()
    assert is_idle(h)


@run
async def test_without_any_worker_it_fails_after_its_patience() -> None:
    h = RouterHarness(num_prefill=0, num_decode=1, worker_wait_timeout_s=10.0)
    client = embed(h)
    await settle()
    for _ in range(11):
        h.clock.advance(1.0)
        h.d[0].worker.last_heard = h.d[0].worker.last_progress = h.clock()
        h.router.check_deadlines()
        await settle()
    with pytest.raises(UnavailableError, match="no prefill worker is connected; nobody came within 10 s"):
        await client.task
    assert is_idle(h)


@run
async def test_a_missing_decode_worker_does_not_end_its_patience() -> None:
    h = RouterHarness(num_prefill=1, num_decode=0, worker_wait_timeout_s=10.0)
    h.p[0].worker.num_starting = MAX_STARTING
    generating = h.request()
    await settle()
    client = embed(h)
    await settle()
    # The room is not empty, so it takes its turn there.
    assert h.router.num_waiting == 2
    for _ in range(11):
        h.clock.advance(1.0)
        h.p[0].worker.last_heard = h.p[0].worker.last_progress = h.clock()
        h.router.check_deadlines()
        await settle()
    with pytest.raises(UnavailableError):
        await generating.task
    assert not client.task.done() and h.router.num_waiting == 1
    h.p[0].worker.num_starting = 0
    h.router._room.is_due = True
    h.router.check_deadlines()
    await settle()
    answer(h.p[0], client)
    await client.task


@run
async def test_a_client_that_leaves_ends_it() -> None:
    h = RouterHarness()
    client = embed(h)
    await settle()
    await client.leave()
    assert h.p[0].of(Abort) == [Abort(client.tracker.request_id, 0)] and not h.d[0].of(Abort)
    assert is_idle(h)
    answer(h.p[0], client)
    assert is_idle(h)


@run
async def test_failures_count() -> None:
    h = RouterHarness(max_attempts=3)
    client = embed(h)
    for attempt in range(3):
        await settle()
        h.p[0].say(Failed(client.tracker.request_id, attempt, "broken"))
    with pytest.raises(UnavailableError, match="given up after 3 failed attempts"):
        await client.task
    assert is_idle(h)


@run
async def test_one_that_ends_its_workers_is_given_up() -> None:
    h = RouterHarness(num_prefill=3)
    client = embed(h)
    for _ in range(3):
        await settle()
        h.clock.advance(2 * SUSPECT_REST_S)
        for worker in h.router.workers:
            worker.last_heard = worker.last_progress = h.clock()
        h.router.check_deadlines()
        await settle()
        [worker] = [w for w in h.router.workers if w.num_starting]
        h.router.lose_worker(worker, "disconnected", "crashed")
    with pytest.raises(InternalError, match="3 workers were lost"):
        await client.task
    assert h.router.num_requests == 0


@run
async def test_limits_apply() -> None:
    h = RouterHarness(max_queued_requests=1)
    with pytest.raises(RequestTooLargeError, match="401 prompt tokens and 0 output tokens"):
        await embed(h, (1,) * 401).task
    # The whole pool.
    first = embed(h, (1,) * 400)
    await settle()
    assert len(h.p[0].of(Prefill)) == 1
    with pytest.raises(OverloadedError):
        await embed(h).task
    await first.leave()
    assert is_idle(h)


@run
async def test_a_token_instead_of_an_embedding_is_refused() -> None:
    h = RouterHarness()
    client = embed(h)
    await settle()
    with pytest.raises(ValueError, match="only embedded"):
        h.p[0].say(first_token(client.tracker.request_id, 0, 0, 10))
    await client.leave()
    assert is_idle(h)


@run
async def test_an_unrequested_embedding_is_refused() -> None:
    h = RouterHarness()
    client = h.request()
    await settle()
    with pytest.raises(ValueError, match="unrequested embedding"):
        answer(h.p[0], client)
    h.p[0].say(first_token(client.tracker.request_id, 0, 0, 10))
    await client.leave()
    assert is_idle(h)
