from collections.abc import Callable
from typing import Any

import pytest

from tandem.messages import (
    Admit,
    Failed,
    Finished,
    FirstToken,
    GaveBack,
    Heartbeat,
    LeaseLost,
    Prefill,
    PrefillDeferred,
)
from tandem.router.errors import InternalError, RequestTimeoutError, UnavailableError
from tandem.router.workers.worker import Pair
from tests.fakes.router_harness import Client, RouterHarness, first_token, run, settle, step_tokens
from tests.fakes.routing import RecordingPolicy
from tests.fakes.scripted_worker import ScriptedWorker

BEGUN = ["choose", "attempt_started"]


class Watched(RouterHarness):
    """Its policy keeps a record, without the calls before the first request."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1, **config: Any) -> None:
        self.policy = RecordingPolicy()
        super().__init__(num_prefill, num_decode, self.policy, **config)
        self.policy.calls.clear()

    async def begun(self, **request: Any) -> tuple[Client, str]:
        client = self.request(**request)
        await settle()
        return client, client.tracker.request_id

    def last_end(self) -> tuple[Pair | None, str]:
        name, pair, _, end = self.policy.calls[-1]
        assert name == "request_finished"
        return pair, end


@run
async def test_a_request_that_nothing_happens_to() -> None:
    h = Watched()
    client, request_id = await h.begun(
        max_tokens=5, priority=3, session_id="talk", cache_namespace="tenant", client_request_id="theirs"
    )
    h.p[0].say(first_token(request_id, 0, 0, 10))
    h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
    h.d[0].say(Finished(request_id, 0, "stop", 2, 0, 1))
    await client.task
    assert h.policy.names == ["choose", "attempt_started", "request_finished"]
    (_, pair, chosen_for), (_, started, started_for), (_, finished, finished_for, end) = h.policy.calls
    assert (pair.prefill.worker_id, pair.decode.worker_id) == ("p0", "d0")
    assert started is pair and finished is pair and end == "finished"
    assert started_for == chosen_for
    assert (chosen_for.request_id, chosen_for.attempt) == (request_id, 0)
    assert (chosen_for.prompt_ids, chosen_for.output_ids, chosen_for.max_new_tokens) == ((1, 2, 3), (), 5)
    assert (chosen_for.priority, chosen_for.session_id, chosen_for.cache_namespace) == (3, "talk", "tenant")
    assert (finished_for.attempt, finished_for.output_ids, finished_for.max_new_tokens) == (0, (10, 11), 3)
    # The loads count the attempt exactly between its start and its end.
    assert h.policy.loads == [0, 1, 0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("prefill_failed", lambda request_id: Failed(request_id, 0, "no luck")),
        ("given_back", lambda request_id: GaveBack(request_id, 0)),
        ("lease_lost", lambda request_id: LeaseLost(request_id, 0)),
        ("deferred", lambda request_id: PrefillDeferred(request_id, 0)),
    ],
)
def test_a_failed_attempt_is_told_of_before_the_next_is_chosen_for(kind: str, message: Callable[[str], Any]) -> None:
    @run
    async def scenario() -> None:
        h = Watched()
        client, request_id = await h.begun(max_tokens=5)
        h.p[0].say(first_token(request_id, 0, 0, 10))
        (h.p[0] if kind in ("prefill_failed", "deferred") else h.d[0]).say(message(request_id))
        assert h.policy.names == [*BEGUN, "attempt_failed", *BEGUN]
        assert h.policy.loads == [0, 1, 0, 0, 1]
        _, pair, failed, failed_kind, reason = h.policy.calls[2]
        assert pair is h.policy.calls[0][1] and (failed_kind, bool(reason)) == (kind, True)
        assert (failed.attempt, failed.output_ids) == (0, (10,))
        chosen_for = h.policy.calls[3][2]
        assert (chosen_for.attempt, chosen_for.output_ids, chosen_for.max_new_tokens) == (1, (10,), 4)
        h.p[0].say(first_token(request_id, 1, 1, 11, "stop"))
        await client.task
        assert h.policy.names[5:] == ["request_finished"] and h.policy.calls[-1][2].attempt == 1

    scenario()


@run
async def test_a_lost_worker_is_told_of_before_its_attempts() -> None:
    h = Watched(1, 2)
    clients = [await h.begun() for _ in range(2)]
    h.policy.calls.clear()
    lost = h.d[0].worker
    h.router.lose_worker(lost, "disconnected", "killed")
    assert h.policy.names == ["worker_lost", *(["attempt_failed", *BEGUN] * 2)]
    assert h.policy.calls[0] == ("worker_lost", lost, "killed")
    assert {call[3] for call in h.policy.calls if call[0] == "attempt_failed"} == {"worker_lost"}
    assert all(call[1].decode.worker_id == "d1" for call in h.policy.calls if call[0] in BEGUN)
    # A loss is reported once.
    h.router.lose_worker(lost, "silent", "no heartbeat")
    assert h.policy.names.count("worker_lost") == 1
    for client, _ in clients:
        await client.leave()


@run
async def test_workers_join_and_replace_their_earlier_life() -> None:
    h = Watched()
    again = ScriptedWorker(h.router, "d0", "decode", life="next-life")
    assert h.policy.calls == [
        ("worker_lost", h.d[0].worker, "it has connected again"),
        ("worker_joined", again.worker),
    ]


@run
async def test_an_attempt_that_outlives_its_prefill_worker_has_not_failed() -> None:
    h = Watched(2, 1, decode_word_timeout_s=0.5)
    client, request_id = await h.begun()
    h.p[0].say(first_token(request_id, 0, 0, 10))
    h.router.lose_worker(h.p[0].worker, "disconnected", "killed")
    assert h.policy.names == [*BEGUN, "worker_lost"]
    h.clock.advance(0.6)
    h.router.check_deadlines()
    assert h.policy.names == [*BEGUN, "worker_lost", "attempt_failed", *BEGUN]
    assert h.policy.calls[3][3] == "worker_lost"
    await client.leave()


@run
async def test_a_client_that_leaves_aborts_the_request() -> None:
    h = Watched()
    client, request_id = await h.begun()
    h.p[0].say(first_token(request_id, 0, 0, 10))
    await client.leave()
    assert h.policy.names == [*BEGUN, "request_finished"]
    assert h.last_end() == (h.policy.calls[0][1], "aborted")
    assert h.policy.loads == [0, 1, 0]


@run
async def test_a_stop_string_ends_the_request_before_its_workers_do() -> None:
    h = Watched()
    client, request_id = await h.begun(stop_strings=("b",))
    h.p[0].say(first_token(request_id, 0, 0, ord("a")))
    h.d[0].say(step_tokens(request_id, 0, 1, *b"bc"))
    await client.task
    assert h.last_end() == (h.policy.calls[0][1], "stopped")
    assert h.policy.names == [*BEGUN, "request_finished"]


@run
async def test_a_stop_string_in_what_has_finished_changes_nothing() -> None:
    h = Watched()
    client, request_id = await h.begun(stop_strings=("b",))
    h.p[0].say(FirstToken(request_id, 0, 0, ord("b"), "length", 0, 1))
    await client.task
    assert h.policy.names == [*BEGUN, "request_finished"] and h.last_end()[1] == "finished"


@run
async def test_a_request_that_nobody_comes_back_to_serve_has_failed() -> None:
    h = Watched(worker_wait_timeout_s=5)
    client, _ = await h.begun()
    h.router.lose_worker(h.d[0].worker, "disconnected", "killed")
    assert h.policy.names == [*BEGUN, "worker_lost", "attempt_failed"]
    h.router.check_deadlines()
    for _ in range(6):
        h.clock.advance(0.9)
        h.p[0].say(Heartbeat(1))
        h.router.check_deadlines()
    with pytest.raises(UnavailableError):
        await client.task
    assert h.policy.names == [*BEGUN, "worker_lost", "attempt_failed", "request_finished"]
    # No worker served it at its end.
    assert h.last_end() == (None, "failed")


@run
async def test_a_request_that_failed_too_often_has_failed() -> None:
    h = Watched(max_attempts=2)
    client, request_id = await h.begun()
    for attempt in range(2):
        h.d[0].say(LeaseLost(request_id, attempt))
    with pytest.raises(UnavailableError, match="given up"):
        await client.task
    assert h.policy.names == [*BEGUN, "attempt_failed", *BEGUN, "attempt_failed", "request_finished"]
    assert h.last_end() == (None, "failed")


@run
async def test_a_request_without_any_attempt_is_not_told_of() -> None:
    h = Watched(1, 0)
    client = h.request()
    await settle()
    await client.leave()
    assert h.policy.names == []


@pytest.mark.parametrize("how", ["timeout", "shutdown"])
def test_a_request_that_the_router_ends_has_failed(how: str) -> None:
    @run
    async def scenario() -> None:
        h = Watched(request_timeout_s=30)
        client, _ = await h.begun()
        pair = h.policy.calls[0][1]
        if how == "shutdown":
            h.router.shut_down()
        else:
            h.clock.advance(31)
            for worker in (*h.p, *h.d):
                worker.say(Heartbeat(1))
            h.router.check_deadlines()
        assert h.policy.names == [*BEGUN, "request_finished"]
        assert h.last_end() == (pair, "failed")
        with pytest.raises(RequestTimeoutError if how == "timeout" else UnavailableError):
            await client.task
        # The client's later leaving is no second end.
        assert len(h.policy.calls) == 3

    scenario()


@run
async def test_an_attempt_may_fail_after_the_last_token_of_its_request() -> None:
    h = Watched()
    client, request_id = await h.begun(max_tokens=2)
    h.p[0].say(first_token(request_id, 0, 0, 10))
    h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
    h.router.lose_worker(h.d[0].worker, "disconnected", "killed")
    await client.task
    assert h.policy.names == [*BEGUN, "worker_lost", "attempt_failed", "request_finished"]
    assert h.last_end() == (None, "finished")


@run
async def test_messages_after_the_end_are_no_second_one() -> None:
    h = Watched()
    client, request_id = await h.begun(max_tokens=1)
    h.p[0].say(first_token(request_id, 0, 0, 10, "length"))
    h.d[0].say(Finished(request_id, 0, "length", 1, 0, 1))
    h.d[0].say(LeaseLost(request_id, 0))
    await client.task
    assert h.policy.names == [*BEGUN, "request_finished"]


# --- failing policies ---


@run
async def test_a_choice_that_fails_fails_that_request_alone() -> None:
    h = Watched()
    other, other_id = await h.begun()
    h.policy.fail_in.add("choose")
    with pytest.raises(InternalError, match="the routing policy failed to choose workers"):
        await h.request().task
    h.policy.fail_in.clear()
    assert h.router.num_requests == 1 and len(h.d[0].of(Admit)) == 1
    h.p[0].say(first_token(other_id, 0, 0, 10, "length"))
    await other.task
    assert h.router.num_requests == 0 and h.router.idle.is_set()
    assert [w.num_assigned for w in h.router.workers] == [0, 0]
    assert b'tandem_requests_total{outcome="error"} 1.0' in h.router.metrics.exposition()


@run
async def test_a_choice_for_a_further_attempt_may_fail_too() -> None:
    h = Watched()
    client, request_id = await h.begun()
    h.policy.fail_in.add("choose")
    h.d[0].say(LeaseLost(request_id, 0))
    assert h.policy.names == [*BEGUN, "attempt_failed", "choose", "request_finished"]
    assert h.last_end() == (None, "failed")
    with pytest.raises(InternalError):
        await client.task
    # The worker is still connected.
    assert len(list(h.router.workers)) == 2 and len(h.p[0].of(Prefill)) == 1


@pytest.mark.parametrize("hook", ["attempt_started", "attempt_failed", "request_finished", "worker_lost"])
def test_a_hook_that_fails_changes_nothing(hook: str) -> None:
    @run
    async def scenario() -> None:
        h = Watched(1, 2)
        h.policy.fail_in.add(hook)
        client, request_id = await h.begun()
        h.router.lose_worker(h.d[0].worker, "disconnected", "killed")
        h.p[0].say(first_token(request_id, 1, 0, 10))
        h.d[1].say(step_tokens(request_id, 1, 0, 10, 11))
        h.d[1].say(Finished(request_id, 1, "stop", 2, 0, 1))
        await client.task
        assert client.tokens == [10, 11] and h.router.num_requests == 0
        assert h.policy.names == [*BEGUN, "worker_lost", "attempt_failed", *BEGUN, "request_finished"]

    scenario()


def test_a_session_is_for_the_policy_alone() -> None:
    # Workers never learn the session.
    assert not {"session_id"} & {name for kind in (Admit, Prefill) for name in kind.__dataclass_fields__}
