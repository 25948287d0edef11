from collections.abc import Sequence

import pytest

from tandem.config import RESTART_DELAY_S, WORKER_PROBE_INTERVAL_S, WORKER_SILENCE_LIMIT_S
from tandem.messages import Abort, Admit, Finished, Heartbeat, LeaseLost, Prefill
from tandem.router.errors import (
    InternalError,
    OverloadedError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnavailableError,
)
from tandem.router.waiting_room import BYTES_PER_REQUEST, BYTES_PER_TOKEN, MAX_STARTING, SUSPECT_REST_S
from tests.fakes.router_harness import Client, RouterHarness, first_token, run, settle, step_tokens
from tests.fakes.scripted_worker import ScriptedWorker


def revive(h: RouterHarness, number: int, life: str, start_s: float = 0.0) -> ScriptedWorker:
    """Reconnects a decode worker, linked to every prefill worker."""
    worker = h.d[number] = ScriptedWorker(h.router, f"d{number}", "decode", life=life, start_s=start_s)
    for prefill in h.p:
        link(prefill, worker)
    return worker


def link(prefill: ScriptedWorker, decode: ScriptedWorker) -> None:
    prefill.link_to_life(decode.worker.worker_id, decode.worker.incarnation)


def lose(h: RouterHarness, *workers: ScriptedWorker) -> None:
    for worker in workers:
        h.router.lose_worker(worker.worker, "disconnected", "killed")


def begin(h: RouterHarness, decode: ScriptedWorker, client: Client) -> None:
    tracker = client.tracker
    decode.say(step_tokens(tracker.request_id, tracker.attempt, len(tracker.output_ids), 10))


def pass_time(h: RouterHarness, seconds: float) -> None:
    """Calls the router's watch while workers send heartbeats."""
    for _ in range(round(seconds / 0.5)):
        h.clock.advance(0.5)
        for worker in h.router.workers:
            h.router.receive(worker, Heartbeat(worker.num_steps + 1))
        h.router.check_deadlines()


async def sent(h: RouterHarness, count: int, **request: object) -> list[Client]:
    clients = [h.request(**request) for _ in range(count)]  # type: ignore[arg-type]
    await settle()
    return clients


async def leave(clients: Sequence[Client]) -> None:
    for client in clients:
        await client.leave()


def waiting(h: RouterHarness) -> float:
    return sample(h, "tandem_requests_waiting")


def sample(h: RouterHarness, name: str) -> float:
    lines = [line.split() for line in h.router.metrics.exposition().decode().splitlines()]
    return next(float(line[-1]) for line in lines if line[0] == name)


@run
async def test_the_loss_of_the_only_worker_of_a_role_is_a_pause() -> None:
    for role in ("decode", "prefill"):
        h = RouterHarness()
        (client,) = await sent(h, 1)
        request_id = client.tracker.request_id
        if role == "decode":
            h.p[0].say(first_token(request_id, 0, 0, 10))
            h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
            lose(h, h.d[0])
        else:
            lose(h, h.p[0])
        assert h.router.not_ready_reason() == f"no {role} worker is connected" and waiting(h) == 1
        (late,) = await sent(h, 1)
        pass_time(h, 30)
        assert not client.task.done() and not late.task.done() and waiting(h) == 2
        if role == "decode":
            revive(h, 0, "next")
        else:
            h.p[0] = ScriptedWorker(h.router, "p0", "prefill", life="next")
            h.p[0].link_to("d0")
        assert h.router.not_ready_reason() == "" and waiting(h) == 0
        again, admit = h.d[0].of(Admit)[-2:]
        assert (again.request_id, again.attempt) == (request_id, 1)
        assert (admit.request_id, admit.attempt) == (late.tracker.request_id, 0)
        assert again.output_ids == ((10, 11) if role == "decode" else ())
        assert sample(h, "tandem_worker_wait_seconds_count") == 2 and sample(h, "tandem_worker_wait_seconds_sum") == 60
        await leave([client, late])


@run
async def test_waiting_is_no_failed_attempt() -> None:
    h = RouterHarness(max_attempts=1)
    (client,) = await sent(h, 1, max_tokens=100)
    for life in range(6):
        begin(h, h.d[0], client)
        for _ in range(10):
            begin(h, h.d[0], client)
        lose(h, h.d[0])
        revive(h, 0, f"life {life}")
    assert client.tracker.attempt == 6 and not client.task.done()
    await client.leave()


@run
async def test_who_waits_too_long_is_told_for_whom() -> None:
    h = RouterHarness(worker_wait_timeout_s=10)
    (client,) = await sent(h, 1)
    lose(h, h.d[0])
    pass_time(h, 9)
    assert not client.task.done()
    pass_time(h, 2)
    with pytest.raises(UnavailableError, match="no decode worker is connected; nobody came within 10 s"):
        await client.task
    assert h.router.num_requests == 0 and waiting(h) == 0


@run
async def test_request_outlasts_a_hung_only_worker() -> None:
    """The supervisor kills the worker after a minute, and the next one loads as long as the last."""
    h = RouterHarness(worker_wait_timeout_s=-1)
    (client,) = await sent(h, 1)
    lose(h, h.d[0])
    revive(h, 0, "slow", start_s=40.0)
    begin(h, h.d[0], client)
    lose(h, h.d[0])
    pass_time(h, WORKER_SILENCE_LIMIT_S + WORKER_PROBE_INTERVAL_S + RESTART_DELAY_S + 40)
    assert not client.task.done()
    pass_time(h, 300)
    with pytest.raises(UnavailableError, match="nobody came within 155 s"):
        await client.task


@run
async def test_only_time_without_any_pair_counts_as_waiting() -> None:
    h = RouterHarness(worker_wait_timeout_s=10)
    clients = await sent(h, MAX_STARTING + 3)
    lose(h, h.d[0])
    pass_time(h, 8)
    revive(h, 0, "next")
    assert waiting(h) == 3
    # A busy worker ends the wait, and its loss starts a new one.
    pass_time(h, 60)
    lose(h, h.d[0])
    pass_time(h, 8)
    assert waiting(h) == MAX_STARTING + 3 and not any(client.task.done() for client in clients)
    await leave(clients)


@run
async def test_a_request_s_own_deadline_holds_while_it_waits() -> None:
    h = RouterHarness(request_timeout_s=20)
    lose(h, h.d[0])
    (client,) = await sent(h, 1)
    pass_time(h, 21)
    with pytest.raises(RequestTimeoutError, match="not finished within 20 s"):
        await client.task
    assert waiting(h) == 0


@run
async def test_a_client_that_leaves_waits_no_more() -> None:
    h = RouterHarness()
    lose(h, h.d[0])
    clients = await sent(h, 3)
    await clients[1].leave()
    assert waiting(h) == 2 and h.router.num_requests == 2
    revive(h, 0, "next")
    assert [a.request_id for a in h.d[0].of(Admit)] == [clients[i].tracker.request_id for i in (0, 2)]
    await leave([clients[0], clients[2]])


@pytest.mark.parametrize("how", ["drain", "shut_down"])
def test_who_waits_when_the_cluster_stops_is_told_so(how: str) -> None:
    @run
    async def scenario() -> None:
        h = RouterHarness()
        (client,) = await sent(h, 1)
        lose(h, h.d[0])
        getattr(h.router, how)()
        with pytest.raises(UnavailableError, match="the server is shutting down"):
            await client.task
        assert h.router.idle.is_set()

    scenario()


@run
async def test_while_draining_nobody_waits_for_a_worker_that_is_lost() -> None:
    h = RouterHarness()
    (client,) = await sent(h, 1)
    h.router.drain()
    lose(h, h.d[0])
    with pytest.raises(UnavailableError, match="no decode worker is connected"):
        await client.task
    assert h.router.idle.is_set()


@run
async def test_those_that_a_worker_has_not_taken_yet_are_served_while_draining() -> None:
    h = RouterHarness()
    clients = await sent(h, MAX_STARTING + 1)
    lose(h, h.d[0])
    revive(h, 0, "next")
    h.router.drain()
    begin(h, h.d[0], clients[0])
    assert waiting(h) == 0 and len(h.d[0].of(Admit)) == MAX_STARTING + 1
    await leave(clients)


@run
async def test_new_requests_are_refused_once_those_that_wait_hold_too_much() -> None:
    held = BYTES_PER_REQUEST + 3 * BYTES_PER_TOKEN
    h = RouterHarness(max_waiting_bytes=2 * held + held // 2)
    (running,) = await sent(h, 1)
    lose(h, h.d[0])
    (first,) = await sent(h, 1)
    with pytest.raises(OverloadedError, match="2 requests wait for a worker and hold as much memory as they may"):
        await h.request().task
    # Also before the prompt is tokenized.
    with pytest.raises(OverloadedError):
        h.router.check_capacity(1)
    # Waiting requests keep their place, and make room when they leave.
    await first.leave()
    (second,) = await sent(h, 1)
    assert not second.task.done() and not running.task.done()
    revive(h, 0, "next")
    h.router.check_capacity(1)
    (third,) = await sent(h, 1)
    assert len(h.d[0].of(Admit)) == 3
    await leave([running, second, third])


@run
async def test_those_that_were_being_served_wait_whatever_they_hold() -> None:
    h = RouterHarness(max_waiting_bytes=1)
    clients = await sent(h, 3)
    lose(h, h.d[0])
    assert waiting(h) == 3
    revive(h, 0, "next")
    assert waiting(h) == 0
    await leave(clients)


@run
async def test_the_first_worker_back_takes_what_it_gets_going() -> None:
    h = RouterHarness(1, 3)
    lose(h, *h.d)
    clients = await sent(h, 3 * MAX_STARTING + 5)
    by_id = {client.tracker.request_id: client for client in clients}
    # The prefill worker too takes MAX_STARTING at most.
    first = revive(h, 0, "next")
    assert len(first.of(Admit)) == MAX_STARTING
    second, third = revive(h, 1, "next"), revive(h, 2, "next")
    assert not second.of(Admit) and waiting(h) == 2 * MAX_STARTING + 5
    # Each request that begins lets one more start, at the least loaded worker.
    for admit in first.of(Admit)[:MAX_STARTING]:
        begin(h, first, by_id[admit.request_id])
    counts = [len(worker.of(Admit)) for worker in (first, second, third)]
    assert counts == [MAX_STARTING, MAX_STARTING // 2, MAX_STARTING // 2]
    order = [prefill.request_id for prefill in h.p[0].of(Prefill)]
    assert order == [client.tracker.request_id for client in clients[: len(order)]]
    await leave(clients)


@run
async def test_no_worker_that_is_full_takes_what_others_could() -> None:
    h = RouterHarness(4, 2)
    lose(h, *h.d)
    clients = await sent(h, 100)
    first = revive(h, 0, "next")
    # The worker gets no more while its requests do not begin.
    pass_time(h, 20)
    assert len(first.of(Admit)) == MAX_STARTING
    second = revive(h, 1, "next")
    assert len(second.of(Admit)) == MAX_STARTING and len(first.of(Admit)) == MAX_STARTING
    assert waiting(h) == 100 - 2 * MAX_STARTING
    await leave(clients)


@run
async def test_who_comes_while_others_wait_stands_behind_them() -> None:
    h = RouterHarness()
    clients = await sent(h, MAX_STARTING + 1)
    lose(h, h.d[0])
    revive(h, 0, "next")
    (late,) = await sent(h, 1)
    assert waiting(h) == 2
    begin(h, h.d[0], clients[0])
    begin(h, h.d[0], clients[1])
    ids = [admit.request_id for admit in h.d[0].of(Admit)]
    assert ids[-2:] == [clients[-1].tracker.request_id, late.tracker.request_id] and waiting(h) == 0
    # Without waiting requests, new ones are assigned at once, whatever the load.
    more = await sent(h, 2 * MAX_STARTING)
    assert waiting(h) == 0
    await leave([*clients, late, *more])


@run
async def test_what_turns_out_not_to_fit_is_refused_when_a_worker_is_there() -> None:
    h = RouterHarness(0, 0)
    (large,) = await sent(h, 1, max_tokens=398)
    ScriptedWorker(h.router, "b", "both")
    with pytest.raises(RequestTooLargeError, match="3 prompt tokens and 398 output tokens do not fit"):
        await large.task
    assert h.router.num_requests == 0


# --- requests that crash workers ---


@run
async def test_a_request_that_ends_every_worker_ends_three_and_nobody_with_it() -> None:
    h = RouterHarness()
    innocent = await sent(h, 5, max_tokens=100)
    (poison,) = await sent(h, 1)
    num_lives = 0

    async def live() -> None:
        """One life of the decode worker: all requests proceed until it computes the poison."""
        nonlocal num_lives
        num_lives += 1
        for _ in range(200):
            admitted = [admit.request_id for admit in h.d[0].of(Admit)]
            for client in innocent:
                if client.tracker.request_id in admitted and len(client.tracker.output_ids) < 90:
                    begin(h, h.d[0], client)
            if poison.tracker.request_id in admitted:
                break
            pass_time(h, 0.5)
        lose(h, h.d[0])
        await settle()

    await live()
    while not poison.task.done() and num_lives < 20:
        revive(h, 0, f"life {num_lives}")
        await live()
    with pytest.raises(InternalError, match="given up: 3 workers were lost while they served it"):
        await poison.task
    assert num_lives == 3
    revive(h, 0, "last")
    assert len(h.d[0].of(Admit)) == 5 and not any(client.task.done() for client in innocent)
    assert [w.num_suspects for w in h.router.workers] == [0, 0]
    await leave(innocent)


@run
async def test_suspects_are_tried_one_at_a_time_and_cleared_when_they_get_past_the_place() -> None:
    h = RouterHarness()
    clients = await sent(h, 3, max_tokens=100)
    for life in ("second", "third"):
        lose(h, h.d[0])
        revive(h, 0, life)
    # Other workers may be dying now.
    assert not h.d[0].of(Admit) and waiting(h) == 3
    pass_time(h, SUSPECT_REST_S)
    assert len(h.d[0].of(Admit)) == 1 and waiting(h) == 2
    # A new request is no suspect, and does not wait for them.
    (late,) = await sent(h, 1)
    assert [admit.request_id for admit in h.d[0].of(Admit)] == [c.tracker.request_id for c in (clients[0], late)]
    for _ in range(7):
        begin(h, h.d[0], clients[0])
    assert waiting(h) == 2
    begin(h, h.d[0], clients[0])
    assert waiting(h) == 1, "eight tokens on, it was not this one"
    # Only the suspect under test is blamed for the next loss.
    lose(h, h.d[0])
    with pytest.raises(InternalError, match="3 workers were lost"):
        await clients[1].task
    revive(h, 0, "fourth")
    assert [request.num_losses for request in h.router._requests] == [0, 2, 0]
    assert {admit.request_id for admit in h.d[0].of(Admit)} == {
        c.tracker.request_id for c in (clients[0], clients[2], late)
    }
    assert clients[0].tracker.attempt == 3
    await leave([clients[0], clients[2], late])
    assert [(w.num_suspects, w.num_starting, w.num_assigned) for w in h.router.workers] == [(0, 0, 0)] * 2


@run
async def test_a_suspect_goes_to_a_worker_that_it_was_not_lost_on() -> None:
    h = RouterHarness(1, 3)
    # A worker that fails on every request, and is the emptiest after each return.
    others = await sent(h, 3, max_tokens=100)
    victim = next(c for c in others if c.tracker.decode_worker_id == "d0")
    lose(h, h.d[0])
    where = int(victim.tracker.decode_worker_id[1:])
    revive(h, 0, "second")
    lose(h, h.d[where])
    revive(h, where, "second")
    pass_time(h, SUSPECT_REST_S)
    assert victim.tracker.decode_worker_id not in ("d0", f"d{where}")
    for _ in range(8):
        begin(h, h.d[int(victim.tracker.decode_worker_id[1:])], victim)
    assert victim.tracker.attempt == 2 and not victim.task.done()
    await leave(others)


@run
async def test_lost_workers_count_for_no_attempt_and_one_that_has_spoken_last_word_for_none_either() -> None:
    h = RouterHarness(2, 1, max_attempts=1)
    (client,) = await sent(h, 1)
    request_id = client.tracker.request_id
    h.p[0].say(first_token(request_id, 0, 0, 10))
    lose(h, h.p[0])
    h.d[0].say(LeaseLost(request_id, 0))
    assert len(h.p[1].of(Prefill)) == 1 and not client.task.done()
    h.p[1].say(first_token(request_id, 1, 1, 11))
    h.d[0].say(step_tokens(request_id, 1, 1, 11, 12))
    h.d[0].say(Finished(request_id, 1, "length", 3, 0, 1))
    await client.task
    assert client.tokens == [10, 11, 12]
    assert not h.p[0].of(Abort)[1:]


@run
async def test_workers_that_die_at_once_are_nobody_s_fault() -> None:
    h = RouterHarness(1, 8, max_attempts=1)
    clients = await sent(h, 40, max_tokens=100)
    # The router hears of the losses one after the other.
    for worker in h.d:
        lose(h, worker)
    for number in range(8):
        revive(h, number, "next")
    by_id = {client.tracker.request_id: client for client in clients}
    for _ in range(60):
        pass_time(h, 0.5)
        for worker in h.d:
            for admit in worker.of(Admit):
                if len(by_id[admit.request_id].tracker.output_ids) < 20:
                    begin(h, worker, by_id[admit.request_id])
    assert {len(client.tracker.output_ids) for client in clients} == {20}
    await leave(clients)


@run
async def test_a_host_out_of_reach_makes_nobody_a_suspect_so_many_times() -> None:
    h = RouterHarness(1, 0, max_attempts=4)

    async def lose_far(life: int) -> None:
        """The decode worker of another host takes the request and becomes unreachable."""
        far = ScriptedWorker(h.router, "far", "decode", life=f"life {life}", host="another host")
        link(h.p[0], far)
        pass_time(h, SUSPECT_REST_S)
        assert len(far.of(Admit)) == 1
        h.clock.advance(2.0)
        h.router.lose_worker(far.worker, "silent", "gone")
        await settle()

    (client,) = await sent(h, 1, max_tokens=100)
    (request,) = h.router._requests
    for life in range(4):
        await lose_far(life)
        assert not request.is_suspect
    # Six excused losses in one place are no accident.
    for life in range(4, 6):
        await lose_far(life)
    assert request.is_suspect and not client.task.done()
    await leave([client])
