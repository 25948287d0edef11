import pytest

from tandem.messages import Abort, Failed, Finished, GaveBack, Heartbeat, LeaseLost, LinkState, Prefill
from tandem.router.errors import UnavailableError
from tests.fakes.router_harness import RouterHarness, first_token, run, settle, step_tokens


@pytest.mark.parametrize("end", [GaveBack, LeaseLost])
def test_an_attempt_that_ends_is_started_again_with_what_was_passed_on(end: type) -> None:
    async def scenario() -> None:
        h = RouterHarness()
        client = h.request()
        await settle()
        request_id = client.tracker.request_id
        h.p[0].say(first_token(request_id, 0, 0, 10))
        h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
        h.d[0].say(end(request_id, 0))
        again = h.p[0].of(Prefill)[1]
        assert (again.attempt, again.prompt_ids, again.output_ids) == (1, (1, 2, 3), (10, 11))
        assert h.p[0].of(Abort) == [Abort(request_id, 0)]
        h.d[0].say(step_tokens(request_id, 0, 2, 99))  # of the old attempt
        h.p[0].say(first_token(request_id, 1, 2, 12))
        h.d[0].say(step_tokens(request_id, 1, 2, 12, 13))
        h.d[0].say(Finished(request_id, 1, "length", 4, 0, 1))
        await client.task
        assert client.tokens == [10, 11, 12, 13]

    run(scenario)()


@run
async def test_a_lost_worker_s_requests_go_on_elsewhere() -> None:
    h = RouterHarness(1, 2)
    client = h.request()
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first_token(request_id, 0, 0, 10))
    h.router.lose_worker(h.d[0].worker, "disconnected", "killed")
    assert h.d[0].disconnected == "killed"
    assert h.p[0].of(Prefill)[1].decode_worker_id == "d1"
    h.d[1].say(step_tokens(request_id, 1, 1, 11))
    h.p[0].say(first_token(request_id, 1, 1, 11))
    h.d[1].say(Finished(request_id, 1, "stop", 2, 0, 1))
    await client.task
    assert client.tokens == [10, 11]


@run
async def test_without_any_wait_the_last_worker_s_loss_fails_its_requests_clearly() -> None:
    h = RouterHarness(worker_wait_timeout_s=0)
    client = h.request()
    await settle()
    h.router.lose_worker(h.d[0].worker, "disconnected", "killed")
    with pytest.raises(UnavailableError, match="no decode worker is connected"):
        await client.task
    assert h.p[0].of(Abort)


@run
async def test_attempts_are_bounded() -> None:
    h = RouterHarness()
    client = h.request()
    await settle()
    for attempt in range(3):
        h.p[0].say(Failed(client.tracker.request_id, attempt, "no luck"))
    with pytest.raises(UnavailableError, match="given up after 3 failed attempts"):
        await client.task


@run
async def test_a_link_that_tells_of_its_worker_s_end_is_no_failure_but_breaking_every_link_is() -> None:
    h = RouterHarness()
    client = h.request()
    await settle()
    d = h.d[0].worker
    for attempt in range(6):
        h.p[0].say(LinkState(d.worker_id, d.incarnation, up=False))
        h.p[0].say(Failed(client.tracker.request_id, attempt, "the link to the decode worker was lost"))
        assert len(h.p[0].of(Prefill)) == attempt + 1 and not client.task.done()
        h.p[0].link_to_life(d.worker_id, d.incarnation)
        h.router.check_deadlines()
    # Three lost links are excused before the three failures.
    with pytest.raises(UnavailableError, match="given up after 3 failed attempts"):
        await client.task


@run
async def test_a_worker_lost_between_the_last_token_and_its_finish_loses_nothing() -> None:
    h = RouterHarness(1, 2)
    client = h.request(max_tokens=2)
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first_token(request_id, 0, 0, 10))
    h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
    h.router.lose_worker(h.d[0].worker, "disconnected", "killed")
    await client.task
    assert (client.tokens, client.tracker.finish_reason) == ([10, 11], "length")
    assert len(h.p[0].of(Prefill)) == 1
    assert [w.num_assigned for w in h.router.workers] == [0, 0]


@run
async def test_being_given_back_is_no_failure() -> None:
    h = RouterHarness()
    client = h.request()
    await settle()
    for attempt in range(10):
        h.d[0].say(GaveBack(client.tracker.request_id, attempt))
    assert len(h.p[0].of(Prefill)) == 11 and not client.task.done()
    await client.leave()


@run
async def test_a_prefill_worker_s_death_does_not_matter_once_decode_has_spoken() -> None:
    h = RouterHarness(2, 1)
    client = h.request()
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first_token(request_id, 0, 0, 10))
    h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
    assert h.p[0].worker.num_assigned == 0
    h.router.lose_worker(h.p[0].worker, "disconnected", "killed")
    h.d[0].say(step_tokens(request_id, 0, 2, 12))
    h.d[0].say(Finished(request_id, 0, "stop", 3, 0, 1))
    await client.task
    assert client.tokens == [10, 11, 12] and not h.p[1].of(Prefill)


@run
async def test_after_the_first_token_the_decode_worker_is_asked_by_waiting() -> None:
    h = RouterHarness(2, 1, decode_word_timeout_s=0.5)
    client = h.request()
    await settle()
    request_id = client.tracker.request_id
    h.p[0].say(first_token(request_id, 0, 0, 10))
    h.router.lose_worker(h.p[0].worker, "disconnected", "killed")
    assert not h.p[1].of(Prefill), "the decode worker may have the pages"
    h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
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
        h = RouterHarness(2, 1, decode_word_timeout_s=0.5)
        client = h.request()
        await settle()
        request_id = client.tracker.request_id
        h.p[0].say(first_token(request_id, 0, 0, 10))
        h.router.lose_worker(h.p[0].worker, "disconnected", "killed")
        if says_lost:
            h.d[0].say(LeaseLost(request_id, 0))
        else:
            h.clock.advance(0.6)
            h.router.check_deadlines()
        (again,) = h.p[1].of(Prefill)
        assert (again.attempt, again.output_ids) == (1, (10,))
        await client.leave()
        assert [w.num_assigned for w in h.router.workers] == [0, 0]
        assert [w.num_pending_tokens for w in h.router.workers] == [0, 0]

    run(scenario)()
