from tandem.forward_times import START_TIMES
from tandem.router.router import WATCH_INTERVAL_S
from tandem.router.workers.leans import GOOD_FOR_S, RouterDemand
from tandem.router.workers.prompt_count import PromptCount
from tandem.router.workers.worker import Estimate
from tests.fakes.router_harness import RouterHarness, run, settle
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
    ScriptedWorker(h.router, "alone", "both")
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
async def test_fixed_roles_have_no_demand() -> None:
    h = RouterHarness(1, 1)
    assert h.router.exchange_leans({}) == RouterDemand()


def test_attended_tokens() -> None:
    count = PromptCount()
    count.add(4, None)
    assert (count.prompts, count.tokens, count.attended, count.elsewhere) == (1, 4, 8, 4)
    # 2 tokens attend to 8 before them, and to half of 2.
    count.add(10, Estimate(2))
    assert (count.prompts, count.tokens, count.attended, count.elsewhere) == (2, 6, 8 + 18, 4 + 2)
    count.add(10, Estimate(2, num_elsewhere=4))
    assert (count.prompts, count.tokens, count.attended) == (3, 8, 8 + 18 + 18)
    # 4 tokens attend to 6 before them, and to half of 4.
    assert (count.elsewhere, count.elsewhere_attended) == (4 + 2 + 4, 8 + 18 + 4 * 6 + 8)
