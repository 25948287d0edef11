from dataclasses import replace

from tandem.forward_times import START_TIMES
from tandem.messages import Finished, ForwardTimes, Heartbeat, WorkerStats
from tandem.router.router import WATCH_INTERVAL_S
from tandem.router.workers.leans import GOOD_FOR_S
from tandem.router.workers.prompt_count import PromptCount
from tandem.router.workers.worker import Estimate
from tandem.router.workers.worker_registry import WARM_S
from tests.fakes.router_harness import RouterHarness, first_token, run, settle, step_tokens
from tests.fakes.scripted_worker import ScriptedWorker


def leans(h: RouterHarness) -> dict[str, str]:
    return {worker.worker_id: worker.lean for worker in h.router.workers}


def two_alike() -> RouterHarness:
    h = RouterHarness(0, 0, heartbeat_timeout_s=1e3, stall_timeout_s=1e3)
    a = ScriptedWorker(h.router, "a", "both", has_links=True)
    b = ScriptedWorker(h.router, "b", "both", has_links=True)
    a.link_to("b")
    b.link_to("a")
    return h


@run
async def test_leans_apply_to_present_and_later_workers() -> None:
    h = two_alike()
    assert leans(h) == {"a": "none", "b": "none"}
    h.router.exchange_leans({"a": "prefill", "b": "decode", "c": "both"})
    ScriptedWorker(h.router, "c", "both", has_links=True)
    ScriptedWorker(h.router, "d", "both", has_links=True)
    assert leans(h) == {"a": "prefill", "b": "decode", "c": "both", "d": "none"}
    assert h.router.workers.num_lean_changes == 2
    exposition = h.router.metrics.exposition().decode()
    for lean in ("none", "prefill", "decode", "both"):
        assert f'tandem_leaning_workers{{lean="{lean}"}} 1.0' in exposition


@run
async def test_plan_expires_unless_repeated() -> None:
    h = two_alike()
    h.router.exchange_leans({"a": "prefill", "b": "decode"})
    h.clock.advance(GOOD_FOR_S - WATCH_INTERVAL_S)
    h.router.check_deadlines()
    assert leans(h)["a"] == "prefill"
    h.clock.advance(WATCH_INTERVAL_S)
    h.router.check_deadlines()
    assert set(leans(h).values()) == {"none"}


@run
async def test_router_reports_demand() -> None:
    h = two_alike()
    assert h.router.exchange_leans({}).prompts == 0
    client = h.request(prompt_ids=tuple(range(10)))
    await settle()
    demand = h.router.exchange_leans({})
    assert (demand.prompts, demand.prompt_tokens, demand.attended_tokens) == (1, 10, 50)
    assert set(demand.num_decoding) == {"a", "b"}
    assert sum(demand.num_decoding.values()) <= 1
    assert demand.num_kv_tokens == 10 * sum(demand.num_decoding.values())
    assert demand.times == START_TIMES["cpu"]
    demand = h.router.workers.demand(PromptCount(1, 2, 3, 4, 5))
    assert (demand.prompts, demand.prompt_tokens, demand.attended_tokens) == (1, 2, 3)
    assert (demand.elsewhere_tokens, demand.elsewhere_attended) == (4, 5)
    await client.leave()


@run
async def test_demand_counts_requests_that_wait_without_any_worker() -> None:
    h = RouterHarness(0, 0, heartbeat_timeout_s=1e3, stall_timeout_s=1e3, max_queued_requests=2)
    clients = [h.request(prompt_ids=tuple(range(10))) for _ in range(3)]
    await settle()
    h.clock.advance(3.0)
    demand = h.router.demand()
    assert (demand.num_waiting, demand.num_unplaced, demand.waiting_tokens) == (2, 2, 20)
    assert demand.oldest_wait_s == 3.0
    assert demand.arrivals == 3, "the refused one is demand too"
    assert (demand.times.step_s, demand.is_measured, demand.num_decoding) == (0.0, False, {})
    for client in clients:
        await client.leave()
    demand = h.router.demand()
    assert (demand.num_waiting, demand.num_unplaced, demand.waiting_tokens, demand.oldest_wait_s) == (0, 0, 0, 0.0)


@run
async def test_waiting_ends_with_the_first_token_and_outputs_are_counted() -> None:
    h = RouterHarness(1, 1)
    client = h.request(prompt_ids=tuple(range(10)), max_tokens=3)
    await settle()
    demand = h.router.demand()
    assert (demand.num_waiting, demand.num_unplaced, demand.waiting_tokens) == (1, 0, 10)
    assert demand.num_decoding == {"d0": 1}
    request_id = client.tracker.request_id
    h.p[0].say(first_token(request_id, 0, 0, 7))
    demand = h.router.demand()
    assert (demand.num_waiting, demand.waiting_tokens, demand.finished) == (0, 0, 0)
    h.d[0].say(step_tokens(request_id, 0, 1, 8, 9))
    h.d[0].say(Finished(request_id, 0, "length", 3, 0, 1, num_drafted=2, num_accepted=1))
    await client.task
    demand = h.router.demand()
    assert (demand.finished, demand.finished_tokens, demand.finished_steps, demand.arrivals) == (1, 3, 2, 1)


@run
async def test_forward_times_count_after_the_first_seconds() -> None:
    """A new worker's first forward passes are slow."""
    h = RouterHarness(1, 1, heartbeat_timeout_s=1e3, stall_timeout_s=1e3)
    of_prompts = ForwardTimes(prefill_s=0.1, prompt_token_s=0.01, attended_token_s=1e-6)
    of_steps = ForwardTimes(step_s=0.02, request_s=0.001, kv_token_s=1e-6)
    h.p[0].say(Heartbeat(1, WorkerStats(forward_times=of_prompts)))
    assert not h.router.demand().is_measured
    h.d[0].say(Heartbeat(1, WorkerStats(forward_times=of_steps)))
    h.clock.advance(WARM_S)
    demand = h.router.demand()
    assert demand.is_measured
    assert demand.times == ForwardTimes(0.1, 0.01, 1e-6, 0.02, 0.001, 1e-6)
    slow = ScriptedWorker(h.router, "d1", "decode")
    slow.say(Heartbeat(1, WorkerStats(forward_times=replace(of_steps, step_s=9.0))))
    h.clock.advance(WARM_S - 1.0)
    assert h.router.demand().times.step_s == 0.02


def test_attended_tokens() -> None:
    count = PromptCount()
    count.add(4, None)
    assert (count.prompts, count.tokens, count.attended, count.elsewhere) == (1, 4, 8, 4)
    # 2 tokens attend to 8 before them, and to half of 2.
    count.add(10, Estimate(2))
    assert (count.prompts, count.tokens, count.attended, count.elsewhere) == (2, 6, 8 + 18, 4 + 2)
    count.add(10, Estimate(2, num_elsewhere=4))
    assert (count.prompts, count.tokens, count.attended, count.whole) == (3, 8, 8 + 18 + 18, 24)
    # 4 tokens attend to 6 before them, and to half of 4.
    assert (count.elsewhere, count.elsewhere_attended) == (4 + 2 + 4, 8 + 18 + 4 * 6 + 8)
