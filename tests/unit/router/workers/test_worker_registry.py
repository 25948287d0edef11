from dataclasses import replace

import pytest

from tandem.hosts import host_id
from tandem.messages import Heartbeat, LinkState, Peers, Shipped, Tokens, WorkerStats
from tandem.router.errors import UnavailableError
from tandem.router.router import NAMES_PER_LOOK
from tandem.router.workers.link_plan import MAX_ALL, LinkPlan
from tests.fakes.router_harness import RouterHarness, first_token, run, settle, step_tokens
from tests.fakes.scripted_worker import ScriptedWorker


def lost(h: RouterHarness) -> list[tuple[str, str, str]]:
    return [(worker.worker_id, kind, reason) for worker, kind, reason in h.router.workers.find_lost()]


def pairs(h: RouterHarness) -> list[str]:
    return [f"{pair.prefill.worker_id}-{pair.decode.worker_id}" for pair in h.router.workers.candidates]


@run
async def test_missing_link_reason() -> None:
    h = RouterHarness(0, 1, worker_wait_timeout_s=0)
    p = ScriptedWorker(h.router, "p0", "prefill")
    no_link = "no prefill worker has a link to a decode worker"
    assert h.router.not_ready_reason() == f"{no_link} yet"
    p.say(LinkState("d0", "d0-life", up=False, reason="cannot be mapped"))
    assert h.router.not_ready_reason() == f"{no_link}: p0 to d0: cannot be mapped"
    with pytest.raises(UnavailableError, match="p0 to d0: cannot be mapped"):
        await h.request().task
    p.link_to("d0")
    assert h.router.not_ready_reason() == ""
    # The reason is newer than the link's last up report.
    p.say(LinkState("d0", "d0-life", up=False, reason="the stream ended"))
    assert h.router.not_ready_reason() == f"{no_link}: p0 to d0: the stream ended"
    h.router.lose_worker(h.d[0].worker, "silent", "gone")
    ScriptedWorker(h.router, "d0", "decode", life="next-life")
    p.say(LinkState("d0", "d0-life", up=False, reason="late word of the earlier life"))
    assert h.router.not_ready_reason() == f"{no_link} yet"


@run
async def test_largest_request_follows_workers() -> None:
    h = RouterHarness()
    assert h.router.workers.max_request_tokens == 400
    small = ScriptedWorker(h.router, "d1", "decode", num_pages=10)
    assert h.router.workers.max_request_tokens == 40
    assert "this model's maximum context length is 40 tokens" in h.router.workers.size_refusal(20, 21)
    assert h.router.workers.size_refusal(20, 20) == ""
    h.router.lose_worker(small.worker, "disconnected", "killed")
    assert h.router.workers.max_request_tokens == 400
    for worker in (*h.p, *h.d):
        h.router.lose_worker(worker.worker, "disconnected", "killed")
    # Future pool sizes are unknown.
    assert h.router.workers.max_request_tokens == 0 and h.router.workers.size_refusal(10**6, 1) == ""


@run
async def test_pairs_follow_workers_and_links() -> None:
    h = RouterHarness(2, 2)
    registry = h.router.workers
    assert len(registry.candidates) == 4
    h.p[0].say(LinkState("d0", "d0-life", up=False, reason="cut"))
    assert len(registry.candidates) == 3
    # The link is to a life that has not connected yet; the old link is gone.
    h.p[1].say(LinkState("d0", "d0-next", up=True))
    assert len(registry.candidates) == 2
    ScriptedWorker(h.router, "d0", "decode", life="next")
    assert len(registry.candidates) == 3, "what was said of this life before it was here holds"
    h.p[1].say(LinkState("d0", "d0-next", up=True))
    assert len(registry.candidates) == 3
    ScriptedWorker(h.router, "b", "both")
    assert len(registry.candidates) == 4
    for worker in list(registry):
        h.router.lose_worker(worker, "disconnected", "killed")
    assert not registry.candidates and not registry.is_ready


@run
async def test_silent_and_stalled_workers_are_lost() -> None:
    h = RouterHarness(1, 2)
    h.clock.advance(0.9)
    for worker in (*h.p, *h.d):
        worker.say(Heartbeat(1))
    h.clock.advance(0.9)
    for worker in (h.p[0], h.d[0]):
        worker.say(Heartbeat(2))
    h.clock.advance(0.2)
    assert lost(h) == [("d1", "silent", "no heartbeat for 1 s")]
    h.clock.advance(0.9)
    h.d[1].say(Tokens(()))
    for worker in (h.p[0], h.d[0]):
        worker.say(Heartbeat(2))
    h.clock.advance(0.2)
    assert not lost(h)
    for _ in range(6):
        h.clock.advance(0.9)
        h.p[0].say(Heartbeat(3))
        h.d[0].say(Heartbeat(2))
        h.d[1].say(Heartbeat(9))
    assert lost(h) == [("d0", "stalled", "no scheduler step for 5 s")]


@run
async def test_linked_both_workers_pair_with_all() -> None:
    h = RouterHarness(0, 0)
    p, a, b, alone = (
        ScriptedWorker(h.router, "p", "prefill"),
        ScriptedWorker(h.router, "a", "both", has_links=True),
        ScriptedWorker(h.router, "b", "both", has_links=True),
        ScriptedWorker(h.router, "alone", "both"),
    )
    for worker in (p, a, b):
        (*_, peers) = [message for message in worker.sent if isinstance(message, Peers)]
        assert [peer.worker_id for peer in peers.peers] == ["a", "b"]
    assert not [message for message in alone.sent if isinstance(message, Peers)]
    assert pairs(h) == ["a-a", "b-b", "alone-alone"]
    p.link_to("a")
    a.link_to("b")
    assert pairs(h) == ["p-a", "a-a", "a-b", "b-b", "alone-alone"]
    # These, and those of the links from p to b and from b to a.
    assert h.router.workers.num_wanted_pairs == 7
    # A report of a link may precede the decode worker.
    h.router.lose_worker(b.worker, "silent", "gone")
    a.say(LinkState("b", "b-next", up=True))
    assert pairs(h) == ["p-a", "a-a", "alone-alone"]
    ScriptedWorker(h.router, "b", "both", life="next", has_links=True)
    assert pairs(h) == ["p-a", "a-a", "a-b", "alone-alone", "b-b"]


@run
async def test_request_over_half_of_the_pool_is_refused() -> None:
    h = RouterHarness(0, 0)
    ScriptedWorker(h.router, "a", "both", num_pages=20, has_links=True, max_request_pages=10)
    assert h.router.workers.size_refusal(20, 20) == ""
    assert h.router.workers.size_refusal(20, 21) == (
        "20 prompt tokens and 21 output tokens do not fit the workers' KV memory: this model's maximum context "
        "length is 40 tokens; half of the memory is for "
        "prompts that other workers decode: raise num_pages to make room"
    )


@run
async def test_unplanned_worker_gets_no_new_requests() -> None:
    everybody = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "b": "both"}
    h = RouterHarness(2, 2, workers=everybody)
    ScriptedWorker(h.router, "b", "both")
    client = h.request()
    await settle()
    assert client.tracker.prefill_worker_id == "p0" and client.tracker.decode_worker_id == "d0"
    assert h.router.set_workers({"p1": "prefill", "d1": "decode"}) == {"p0": 1, "d0": 1, "b": 0}
    assert pairs(h) == ["p1-d1"]
    other = h.request()
    await settle()
    assert other.tracker.decode_worker_id == "d1"
    # Neither new links nor a return changes this.
    h.p[0].link_to("d1")
    h.router.lose_worker(h.d[0].worker, "disconnected", "it has ended")
    d0 = ScriptedWorker(h.router, "d0", "decode", life="next")
    h.p[1].link_to_life("d0", "d0-next")
    assert pairs(h) == ["p1-d1"]
    await settle()
    assert client.tracker.attempt == 1 and client.tracker.decode_worker_id == "d1"
    assert h.router.set_workers({"p1": "prefill", "d1": "decode"}) == {"p0": 0, "d0": 0, "b": 0}
    h.router.set_workers(everybody)
    assert sorted(pairs(h)) == ["b-b", "p0-d1", "p1-d0", "p1-d1"]
    h.router.lose_worker(d0.worker, "disconnected", "killed")
    await client.leave()
    await other.leave()


@run
async def test_leaving_worker_is_no_fault() -> None:
    h = RouterHarness(1, 2, workers={"p0": "prefill", "d0": "decode", "d1": "decode"})
    h.router.set_workers({"p0": "prefill", "d0": "decode"})
    h.router.lose_worker(h.d[1].worker, "disconnected", "its stream has ended")
    metrics = "\n".join(str(metric) for metric in h.router.metrics.collect())
    assert "value=1.0" not in "\n".join(line for line in metrics.splitlines() if "tandem_faults" in line)
    assert "d1" not in metrics


@run
async def test_given_up_worker_cannot_replace_its_successor() -> None:
    h = RouterHarness(1, 0)
    moved = ScriptedWorker(h.router, "d0", "decode", life="second", num_restarts=1)
    with pytest.raises(ValueError, match="a replacement of this worker is already connected"):
        ScriptedWorker(h.router, "d0", "decode", life="first", num_restarts=0)
    assert h.router.workers.get("d0") is moved.worker
    h.router.lose_worker(moved.worker, "disconnected", "killed")
    ScriptedWorker(h.router, "d0", "decode", life="first", num_restarts=0)


@run
async def test_unreachable_host() -> None:
    for host, silent_s, out_of_reach in (
        ("another", 2.0, True),
        ("another", 0.2, False),
        # The router's host.
        (host_id(), 2.0, False),
    ):
        h = RouterHarness(0, 0)
        lost = ScriptedWorker(h.router, "d0", "decode", host=host)
        h.clock.advance(silent_s)
        assert h.router.workers.is_out_of_reach(lost.worker) is out_of_reach


def planned_apart(count: int) -> dict[str, str]:
    return {f"{role[0]}{i}": role for role in ("prefill", "decode") for i in range(count)}


@run
async def test_large_cluster_links_some_pairs() -> None:
    """Peers, links and what a join costs grow with the workers, not with their square."""
    h = RouterHarness(70, 70, workers=planned_apart(70))
    registry = h.router.workers
    named = {p.worker.worker_id: {peer.worker_id for peer in registry.peers_of(p.worker)} for p in h.p}
    # All workers of the harness share a host.
    assert all(len(names) == 70 for names in named.values())
    apart = RouterHarness(0, 0, workers=planned_apart(70))
    workers = [
        ScriptedWorker(apart.router, name, role, host=f"{name}-host")
        for name, role in apart.router.workers.planned.items()
    ]
    for _ in range(20):
        apart.router.check_deadlines()
    prefill = [worker for worker in workers if worker.worker.sends]
    for worker in prefill:
        (*_, peers) = worker.of(Peers)
        assert peers.peers == apart.router.workers.peers_of(worker.worker)
        assert 16 < len(peers.peers) < 66
        worker.link_to(*(f"d{i}" for i in range(70)))
    assert registry.num_pairs == registry.num_wanted_pairs == 4900
    assert apart.router.workers.num_pairs == apart.router.workers.num_wanted_pairs
    assert apart.router.workers.num_pairs == sum(len(worker.of(Peers)[-1].peers) for worker in prefill)
    sent = sum(len(worker.of(Peers)) for worker in prefill)
    joined = ScriptedWorker(apart.router, "d0", "decode", life="next", host="d0-host")
    apart.router.check_deadlines()
    # Its end and its return.
    assert sum(len(worker.of(Peers)) for worker in prefill) - sent < 2 * 90
    assert joined.worker.receives and not joined.of(Peers)


@run
async def test_leaving_worker_keeps_its_links() -> None:
    """Its requests still hand over."""
    h = RouterHarness(0, 0, workers=planned_apart(70))
    workers = {
        name: ScriptedWorker(h.router, name, role, host=f"{name}-host")
        for name, role in h.router.workers.planned.items()
    }
    registry = h.router.workers
    before = registry.peers_of(workers["p0"].worker)
    h.router.set_workers({name: role for name, role in registry.planned.items() if name != "p0"})
    assert registry.peers_of(workers["p0"].worker) == before
    left = workers["p0"].worker
    h.router.lose_worker(left, "disconnected", "it has ended")
    assert len(registry.peers_of(workers["p1"].worker)) > 16
    # A limit that begins with a new plan ends the other pairs, and its end brings them back.
    small = RouterHarness(2, 2, workers={})
    assert len(pairs(small)) == 4
    small.router.set_workers({"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"})
    assert len(pairs(small)) == 4


@run
async def test_a_link_that_is_no_longer_planned_stays_until_its_requests_have_handed_over() -> None:
    larger = planned_apart(MAX_ALL + 1)
    planned = LinkPlan(larger).receivers_of("p0")
    assert planned is not None
    name = next(f"d{i}" for i in range(MAX_ALL) if f"d{i}" not in planned)
    h = RouterHarness(0, 0, workers=planned_apart(MAX_ALL))
    p, d = (ScriptedWorker(h.router, one, role, host=one) for one, role in (("p0", "prefill"), (name, "decode")))
    p.link_to(name)

    def told() -> set[str]:
        h.router.check_deadlines()
        return {peer.worker_id for peer in p.of(Peers)[-1].peers}

    handed_over, aborted = h.request(), h.request()
    await settle()
    h.router.set_workers(larger)
    assert pairs(h) == [] and told() == {name}, "it gets no new requests"
    await aborted.leave()
    assert told() == {name}
    p.say(first_token(handed_over.tracker.request_id, 0, 0, 7))
    assert told() == {name}, "the pages may be on their way"
    d.say(step_tokens(handed_over.tracker.request_id, 0, 0, 7, 8))
    assert told() == set()


@run
async def test_links_of_a_worker_are_known_from_changes() -> None:
    h = RouterHarness()
    one, other = Shipped("nccl", 1, 100, "d0", 5), Shipped("nccl", 2, 200, "d1", 6)
    worker = h.p[0].worker
    h.p[0].say(Heartbeat(1, WorkerStats(num_running=1, shipped=(one, other))))
    assert worker.take_sent_bytes() == {}, "they were sent before"
    more = replace(other, num_pages=3, num_bytes=500)
    h.p[0].say(Heartbeat(2, WorkerStats(num_running=2, shipped=(more,))))
    h.p[0].say(Heartbeat(3, WorkerStats(num_running=3)))
    assert worker.whole_stats(by_link=True) == WorkerStats(num_running=3, shipped=(one, more))
    assert worker.whole_stats(by_link=False) == WorkerStats(
        num_running=3, shipped=(Shipped("nccl", 4, 600, copying_ns=11),)
    )
    assert worker.take_sent_bytes() == {"d1": 300} and worker.take_sent_bytes() == {}


@run
async def test_joins_of_a_large_cluster_are_told_at_a_bounded_pace() -> None:
    """A join changes the peers of a hundred workers; all joins of a start at once would stall every stream."""
    roles = {f"b{i}": "both" for i in range(64)}
    h = RouterHarness(0, 0, workers=roles)
    workers = [ScriptedWorker(h.router, name, "both", has_links=True) for name in roles]
    told = sum(len(peers.peers) for worker in workers for peers in worker.of(Peers))
    assert told <= NAMES_PER_LOOK + 64
    for _ in range(10):
        h.router.check_deadlines()
    assert all({peer.worker_id for peer in worker.of(Peers)[-1].peers} == set(roles) for worker in workers)
