"""The live workers: who counts as lost, who can serve with whom, and why nobody can."""

import pytest

from router.errors import UnavailableError
from tandem.messages import Heartbeat, LinkState, Tokens
from tests.fakes.router_harness import RouterHarness, run
from tests.fakes.scripted_worker import ScriptedWorker


def lost(h: RouterHarness) -> list[tuple[str, str, str]]:
    return [(worker.worker_id, kind, reason) for worker, kind, reason in h.router.workers.find_lost()]


@run
async def test_why_there_is_no_link_is_said() -> None:
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
    # The last reason counts, not one from before the link was up.
    p.say(LinkState("d0", "d0-life", up=False, reason="the stream ended"))
    assert h.router.not_ready_reason() == f"{no_link}: p0 to d0: the stream ended"
    # What was said of an earlier life of the decode worker says nothing about this one.
    h.router.lose_worker(h.d[0].worker, "silent", "gone")
    ScriptedWorker(h.router, "d0", "decode", life="next-life")
    p.say(LinkState("d0", "d0-life", up=False, reason="late word of the earlier life"))
    assert h.router.not_ready_reason() == f"{no_link} yet"


@run
async def test_silence_and_standstill_lose_a_worker() -> None:
    h = RouterHarness(1, 2)
    h.clock.advance(0.9)
    for worker in (*h.p, *h.d):
        worker.say(Heartbeat(1))
    h.clock.advance(0.9)
    for worker in (h.p[0], h.d[0]):
        worker.say(Heartbeat(2))
    h.clock.advance(0.2)
    assert lost(h) == [("d1", "silent", "no heartbeat for 1 s")]
    # Whatever a worker says, it is not silent.
    h.clock.advance(0.9)
    h.d[1].say(Tokens(()))
    for worker in (h.p[0], h.d[0]):
        worker.say(Heartbeat(2))
    h.clock.advance(0.2)
    assert not lost(h)
    # A worker that talks but does not move.
    for _ in range(6):
        h.clock.advance(0.9)
        h.p[0].say(Heartbeat(3))
        h.d[0].say(Heartbeat(2))
        h.d[1].say(Heartbeat(9))
    assert lost(h) == [("d0", "stalled", "no scheduler step for 5 s")]
