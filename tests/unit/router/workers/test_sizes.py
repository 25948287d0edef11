"""Requests that wait for the first worker of an elastic cluster."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.router.errors import UnavailableError
from tandem.router.worker_wait import ADDED_FACTOR
from tandem.router.workers.sizes import ClusterSize, KindSize
from tests.fakes.router_harness import RouterHarness, run, settle
from tests.fakes.scripted_worker import ScriptedWorker

NOBODY = KindSize(low=0, high=2, target=0, ready=0, starting=0, leaving=0, start_s=400.0)
NONE_YET = ClusterSize({"prefill": NOBODY, "decode": NOBODY})
NO_WORKER = "no prefill and no decode worker is connected"


def harness(size: ClusterSize | None = NONE_YET) -> RouterHarness:
    h = RouterHarness(0, 0, starts_from_zero=size is not None)
    h.router.exchange_leans({}, size)
    return h


def pass_time(h: RouterHarness, seconds: float) -> None:
    h.clock.advance(seconds)
    h.router.check_deadlines()


def test_a_router_without_workers_is_ready_if_they_are_started_for_requests() -> None:
    assert RouterHarness(0, 0).router.not_ready_reason() == NO_WORKER
    assert RouterHarness(0, 0, starts_from_zero=True).router.not_ready_reason() == "", "before the supervisor's word"
    assert harness().router.not_ready_reason() == ""
    assert harness(ClusterSize(routers=("router-0",))).router.not_ready_reason() == NO_WORKER, "all numbers are fixed"
    one_kind = ClusterSize({"decode": NOBODY})
    assert harness(one_kind).router.not_ready_reason() == NO_WORKER, "nobody starts the other kind"
    lost = ClusterSize({"any": replace(NOBODY, low=1)})
    assert harness(lost).router.not_ready_reason() == NO_WORKER, "a worker that should be there is missing"
    assert harness(ClusterSize({"any": NOBODY})).router.not_ready_reason() == ""


@pytest.mark.parametrize("size", [replace(NONE_YET, failure="they break"), None], ids=["failure", "no room"])
def test_a_router_is_not_ready_if_no_worker_can_be_started(size: ClusterSize | None) -> None:
    size = size or ClusterSize({"any": replace(NOBODY, no_room="no room")})
    assert harness(size).router.not_ready_reason() == f"{NO_WORKER}; {size.refusal}"


@run
async def test_requests_wait_for_two_starts_of_the_first_worker() -> None:
    h = harness()
    client = h.request()
    await settle()
    demand = h.router.exchange_leans({}, NONE_YET)
    assert demand.num_unplaced == 1 and demand.arrivals == 1
    pass_time(h, 0.3)
    pass_time(h, ADDED_FACTOR * NOBODY.start_s - 1.0)
    assert not client.task.done()
    h.router.set_workers({"p0": "prefill", "d0": "decode"})
    h.p = [ScriptedWorker(h.router, "p0", "prefill")]
    h.d = [ScriptedWorker(h.router, "d0", "decode")]
    h.p[0].link_to("d0")
    assert client.tracker.attempt == 0, "it is served at once"
    await client.leave()
    late = harness()
    waiting = late.request()
    await settle()
    pass_time(late, 0.3)
    pass_time(late, ADDED_FACTOR * NOBODY.start_s + 1.0)
    with pytest.raises(UnavailableError, match="nobody came within 800 s"):
        await waiting.task


@run
async def test_a_start_that_fails_for_good_fails_the_requests_that_wait_for_it() -> None:
    h = harness()
    client = h.request()
    await settle()
    h.router.exchange_leans({}, replace(NONE_YET, failure="workers cannot be started: no memory"))
    pass_time(h, 0.3)
    with pytest.raises(UnavailableError, match="is connected; workers cannot be started: no memory"):
        await client.task


@run
async def test_the_last_worker_drains_before_it_leaves() -> None:
    """The plan of no worker is a plan."""
    h = RouterHarness(starts_from_zero=True, workers={"p0": "prefill", "d0": "decode"})
    client = h.request()
    await settle()
    assert h.router.set_workers({}) == {"p0": 1, "d0": 1}
    late = h.request()
    await settle()
    assert late.tracker.attempt == -1 and client.tracker.attempt == 0
    await client.leave()
    await late.leave()


def test_the_size_is_exported() -> None:
    size = KindSize(low=1, high=8, target=3, ready=2, starting=1, leaving=0, start_s=12.5, no_room="no GPU")
    h = harness(ClusterSize({"any": size}, {("any", "up", "load"): 4}))
    families = text_string_to_metric_families(h.router.metrics.exposition().decode())
    found = {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}
    assert found["tandem_target_processes", ("any",)] == 3 and found["tandem_most_processes", ("any",)] == 8
    assert found["tandem_size_changes_total", ("up", "any", "load")] == 4
    assert found["tandem_no_room", ("any",)] == 1 and found["tandem_start_duration_seconds", ("any",)] == 12.5


def test_only_the_running_routers_are_shown() -> None:
    h = harness(replace(NONE_YET, routers=("router-0",)))
    assert h.router.router_names == []


def test_the_last_worker_leaves_a_router_that_knew_no_plan() -> None:
    h = RouterHarness(1, 1)
    assert all(map(h.router.workers.stays, h.router.workers))
    h.router.set_workers({})
    assert not any(map(h.router.workers.stays, h.router.workers))


def test_the_usual_wait_is_back_when_no_worker_is_added_any_more() -> None:
    h = harness()
    h.router.exchange_leans({}, None)
    assert h.router._worker_wait.first_start_s == 0.0
