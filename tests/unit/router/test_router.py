import asyncio
from dataclasses import replace

import pytest

from tandem.lifecycle import RECEIVED
from tandem.messages import (
    Abort,
    Admit,
    CachedPrefixes,
    ClockProbe,
    ClockReply,
    Finished,
    GaveBack,
    Heartbeat,
    LeaseLost,
    LinkState,
    Peers,
    Prefill,
    RepeatPrefixes,
    Welcome,
)
from tandem.prefix import prefix_identities
from tandem.router.errors import OverloadedError, RequestTimeoutError, RequestTooLargeError, UnavailableError
from tandem.router.requests.clock_offsets import NUM_FIRST_PROBES
from tandem.sampling_params import SamplingParams
from tests.fakes.request_spec import request_spec
from tests.fakes.router_harness import Client, RouterHarness, first_token, run, settle, step_tokens
from tests.fakes.scripted_worker import PAGE_FORMAT, ScriptedWorker


@run
async def test_a_request_from_start_to_end() -> None:
    h = RouterHarness()
    client = h.request()
    await settle()
    (admit,), (prefill,) = h.d[0].of(Admit), h.p[0].of(Prefill)
    assert (prefill.prompt_ids, prefill.decode_worker_id, prefill.attempt) == ((1, 2, 3), "d0", 0)
    assert admit.request_id == prefill.request_id
    h.p[0].say(first_token(admit.request_id, 0, 0, 10))
    await settle()
    assert client.tokens == [10]
    h.d[0].say(step_tokens(admit.request_id, 0, 0, 10, 11))
    h.d[0].say(Finished(admit.request_id, 0, "stop", 2, 0, 1))
    await client.task
    assert client.tokens == [10, 11] and client.tracker.finish_reason == "stop"
    assert h.router.num_requests == 0
    assert [w.num_assigned for w in h.router.workers] == [0, 0]
    assert not h.d[0].of(Abort) and not h.p[0].of(Abort)


@run
async def test_late_messages_of_a_finished_request_are_ignored() -> None:
    h = RouterHarness()
    client = h.request(max_tokens=1)
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first_token(request_id, 0, 0, 10, "length"))
    h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
    h.d[0].say(Finished(request_id, 0, "stop", 2, 0, 1))
    await client.task
    h.d[0].say(LeaseLost(request_id, 0))
    assert client.tokens == [10]
    assert [w.num_assigned for w in h.router.workers] == [0, 0]


@run
async def test_a_client_that_leaves_ends_the_attempt_on_both_workers() -> None:
    h = RouterHarness()
    client = h.request()
    await settle()
    await client.leave()
    for worker in (h.p[0], h.d[0]):
        assert worker.of(Abort) == [Abort(client.tracker.request_id, 0)]
    assert h.router.num_requests == 0
    assert [w.num_assigned for w in h.router.workers] == [0, 0]


@run
async def test_ids_are_never_used_twice_even_across_restarts() -> None:
    routers = [RouterHarness().router, RouterHarness().router] * 3
    ids = {router.make_tracker(request_spec()).request_id for router in routers}
    assert len(ids) == 6


@run
async def test_without_any_wait_nobody_to_serve_is_said_at_once() -> None:
    for num_prefill, num_decode, reason in (
        (0, 0, "no prefill and no decode worker"),
        (1, 0, "no decode worker"),
        (0, 1, "no prefill worker"),
    ):
        h = RouterHarness(num_prefill, num_decode, worker_wait_timeout_s=0)
        with pytest.raises(UnavailableError, match=reason):
            await h.request().task
    h = RouterHarness(0, 1, worker_wait_timeout_s=0)
    ScriptedWorker(h.router, "p0", "prefill")  # joined, without a link yet
    with pytest.raises(UnavailableError, match="no prefill worker has a link"):
        await h.request().task


@run
async def test_a_request_too_large_for_the_pools_is_refused_at_once() -> None:
    h = RouterHarness()
    with pytest.raises(RequestTooLargeError, match="3 prompt tokens and 398 output tokens do not fit"):
        await h.request(max_tokens=398).task
    assert not h.p[0].of(Prefill)


@run
async def test_overload_is_said_at_once_and_hurts_nobody_in_hand() -> None:
    h = RouterHarness(max_queued_requests=2)
    clients = [h.request() for _ in range(2)]
    await settle()
    with pytest.raises(OverloadedError, match="2 requests wait for their first token"):
        await h.request().task
    # A request with a first token is not queued.
    h.p[0].say(first_token(clients[0].tracker.request_id, 0, 0, 10))
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
    h = RouterHarness(request_timeout_s=30)
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
    h = RouterHarness()
    tracker = h.router.make_tracker(
        request_spec(sampling=SamplingParams(5, seed=9), priority=4, cache_namespace="tenant", moments={RECEIVED: 77})
    )
    client = Client(h.router, tracker)
    await settle()
    h.d[0].say(GaveBack(tracker.request_id, 0))
    for message in (*h.d[0].of(Admit), *h.p[0].of(Prefill)):
        assert (message.priority, message.cache_namespace, message.arrival_ns) == (4, "tenant", 77)
        assert message.sampling == SamplingParams(5, seed=9)
    assert len(h.d[0].of(Admit)) == 2
    await client.leave()


@run
async def test_requests_spread_over_the_pairs() -> None:
    h = RouterHarness(2, 2)
    clients = [h.request() for _ in range(8)]
    await settle()
    assert [len(w.of(Prefill)) for w in h.p] == [4, 4]
    assert [len(w.of(Admit)) for w in h.d] == [4, 4]
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(c.task for c in clients), return_exceptions=True)


@run
async def test_a_combined_worker_is_a_pair_of_its_own() -> None:
    h = RouterHarness(0, 0)
    both = ScriptedWorker(h.router, "b", "both")
    client = h.request()
    await settle()
    assert [type(m) for m in both.sent] == [Welcome, ClockProbe, Admit, Prefill]
    assert both.worker.num_assigned == 1
    await client.leave()
    assert both.worker.num_assigned == 0
    assert len(both.of(Abort)) == 1


@run
async def test_a_router_that_stood_still_does_not_blame_its_workers() -> None:
    h = RouterHarness()
    h.clock.advance(10)
    h.router.check_deadlines(stood_still_s=9.8)
    assert len(list(h.router.workers)) == 2
    h.clock.advance(10)
    h.router.check_deadlines()
    assert not list(h.router.workers)


@run
async def test_a_worker_that_connects_again_replaces_itself() -> None:
    h = RouterHarness()
    client = h.request()
    await settle()
    again = ScriptedWorker(h.router, "d0", "decode", life="next")
    assert h.d[0].disconnected == "it has connected again"
    assert isinstance(again.sent[0], Welcome)
    # The prefill worker's link was to the old life.
    await settle()
    assert not client.task.done() and not again.of(Admit)
    assert h.p[0].of(Peers)[-1].peers[0].worker_id == "d0"
    h.p[0].say(LinkState("d0", "d0-next", up=True))
    assert [admit.attempt for admit in again.of(Admit)] == [1]
    await client.leave()


@run
async def test_a_link_to_a_worker_that_only_its_router_lost_serves_again_when_that_is_back() -> None:
    h = RouterHarness()
    h.router.lose_worker(h.d[0].worker, "disconnected", "its control stream ended")
    assert h.router.not_ready_reason()
    # The link to the same life never went down, so the prefill worker does not report it again.
    again = ScriptedWorker(h.router, "d0", "decode")
    assert not h.router.not_ready_reason()
    client = h.request()
    await settle()
    assert [admit.attempt for admit in again.of(Admit)] == [0]
    # A link that goes down meanwhile is not used.
    h.router.lose_worker(again.worker, "disconnected", "its control stream ended")
    h.p[0].say(LinkState("d0", "d0-life", up=False, reason="cut"))
    ScriptedWorker(h.router, "d0", "decode")
    assert h.router.not_ready_reason()
    await client.leave()


@run
async def test_workers_whose_pages_differ_cannot_join() -> None:
    h = RouterHarness()
    other = replace(PAGE_FORMAT, model_fingerprint="other")
    with pytest.raises(ValueError, match="models differ: this worker has loaded other"):
        ScriptedWorker(h.router, "d9", "decode", page_format=other)
    assert h.router.workers.get("d9") is None
    # A refused worker does not replace the connected one of its name.
    with pytest.raises(ValueError, match="models differ: this worker has loaded other"):
        ScriptedWorker(h.router, "d0", "decode", page_format=other)
    assert h.router.workers.get("d0") is h.d[0].worker
    # The first model counts even without workers: the router's tokenizer is for it.
    for scripted in (*h.p, *h.d):
        h.router.lose_worker(scripted.worker, "disconnected", "gone")
    with pytest.raises(ValueError, match="models differ"):
        ScriptedWorker(h.router, "d0", "decode", page_format=other)
    ScriptedWorker(h.router, "d0", "decode")


@run
async def test_workers_clocks_are_asked_for_when_they_come_and_once_a_second() -> None:
    h = RouterHarness()
    (p,) = h.p
    for number in range(NUM_FIRST_PROBES):
        probes = p.of(ClockProbe)
        assert len(probes) == number + 1
        p.say(ClockReply(probes[-1].sent_ns, probes[-1].sent_ns + 5 * 10**9, probes[-1].sent_ns + 5 * 10**9))
    assert abs(h.router.clocks.offset_ns("p0") - 5 * 10**9) < 10**9
    for _ in range(8):
        h.clock.advance(0.25)
        p.say(Heartbeat(1))
        h.d[0].say(Heartbeat(1))
        h.router.check_deadlines()
    assert len(p.of(ClockProbe)) == NUM_FIRST_PROBES + 2
    h.router.lose_worker(p.worker, "disconnected", "killed")
    assert h.router.clocks.uncertainty_ns("p0") is None


@run
async def test_workers_are_asked_what_they_have_cached_where_the_policy_wants_to_know() -> None:
    (welcome,) = RouterHarness(routing="least_loaded").p[0].of(Welcome)
    assert not welcome.wants_prefixes
    h = RouterHarness(num_prefill=2, routing="cache_aware")
    (welcome,) = h.p[0].of(Welcome)
    assert welcome.wants_prefixes
    prompt = tuple(range(40))
    packed = b"".join(i.to_bytes(8, "little") for i in prefix_identities(prompt, 4, ""))
    h.p[1].say(CachedPrefixes(0, is_whole=True, stored=packed))
    for _ in range(10):
        client = h.request(prompt_ids=(*prompt, 1))
        await settle()
        assert h.p[1].of(Prefill) and not h.p[0].of(Prefill)
        await client.leave()
    h.p[1].say(CachedPrefixes(1, is_whole=False, stored=b"", removed=packed))
    h.p[0].say(CachedPrefixes(0, is_whole=True, stored=packed[:8]))
    h.request(prompt_ids=(*prompt, 1))
    await settle()
    assert h.p[0].of(Prefill)


@run
async def test_a_worker_whose_word_was_missed_is_asked_once_to_begin_anew() -> None:
    h = RouterHarness(routing="cache_aware")
    worker = h.p[0]
    worker.say(CachedPrefixes(0, is_whole=True, stored=b"page-one"))
    worker.say(CachedPrefixes(2, is_whole=False, stored=b"page-two"))
    worker.say(CachedPrefixes(3, is_whole=False, stored=b"page-six"))
    assert worker.of(RepeatPrefixes) == [RepeatPrefixes()]
    known = worker.worker.prefixes
    assert known.identities == {int.from_bytes(b"page-one", "little")}
    worker.say(CachedPrefixes(4, is_whole=True, stored=b"page-two"))
    worker.say(CachedPrefixes(5, is_whole=False, stored=b"page-six"))
    assert known.identities == {int.from_bytes(page, "little") for page in (b"page-two", b"page-six")}
    assert worker.of(RepeatPrefixes) == [RepeatPrefixes()]
    found = h.router.metrics.exposition().decode()
    assert 'tandem_known_prefix_pages{role="prefill",worker="p0"} 2.0' in found
    for kind, count in (("stored", 5), ("removed", 0), ("whole", 2), ("missed", 1)):
        assert f'tandem_prefix_events_total{{kind="{kind}"}} {count}.0' in found
    with pytest.raises(ValueError, match="bytes"):
        worker.say(CachedPrefixes(6, is_whole=False, stored=b"half"))
    another_life = ScriptedWorker(h.router, "p0", "prefill", life="next")
    assert another_life.worker.prefixes.identities == set()
