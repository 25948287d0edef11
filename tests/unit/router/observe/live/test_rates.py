from tandem.messages import Heartbeat, Shipped, WorkerStats
from tandem.router.observe.live.rates import NO_RATES, NUM_LINK_SAMPLES, NUM_SAMPLES, WorkerRates
from tests.fakes.router_harness import RouterHarness
from tests.fakes.scripted_worker import ScriptedWorker


def say(worker: ScriptedWorker, step: int, **stats: object) -> None:
    worker.say(Heartbeat(step, WorkerStats(**stats)))  # type: ignore[arg-type]


def test_rates_of_last_seconds() -> None:
    h, rates = RouterHarness(), WorkerRates()
    for second in range(6 + NUM_SAMPLES):
        num_tokens = max(0, second - 5) * 30
        shipped = (Shipped("tcp", 1, 1000 * second, "d0"), Shipped("tcp", 1, 0, "d1"))
        cached = {"prefix_cached_tokens": 2 * num_tokens, "prefix_disk_tokens": num_tokens}
        say(h.p[0], second, prompt_tokens_computed=num_tokens, shipped=shipped, **cached)
        rates.sample(h.router.workers)
        h.clock.advance(1.0)
    found = rates.of("p0")
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (30, 0, 60)
    assert (found.host_tokens, found.disk_tokens, found.peer_tokens) == (0, 30, 0)
    assert rates.sent_to("p0") == {"d0": 1000}
    assert rates.total(lambda its: its.prompt_tokens) == 30


def test_rates_of_links_cover_ten_seconds() -> None:
    """A handover every six seconds is a rate above 0 at all times."""
    h, rates = RouterHarness(), WorkerRates()
    seen = []
    for second in range(40):
        say(h.p[0], second, shipped=(Shipped("tcp", 1, 6000 * (second // 6), "d0"),), prompt_tokens_computed=second)
        rates.sample(h.router.workers)
        seen.append(rates.sent_to("p0").get("d0", 0.0))
        h.clock.advance(1.0)
    assert set(seen[NUM_LINK_SAMPLES:]) == {600.0, 1200.0}
    # A link that was not used before counts from its first bytes.
    say(h.p[0], 40, shipped=(Shipped("tcp", 1, 6000 * 6, "d0"), Shipped("shm", 1, 5000, "d0")))
    rates.sample(h.router.workers)
    assert rates.sent_to("p0")["d0"] == 1100
    for second in range(NUM_LINK_SAMPLES):
        h.clock.advance(1.0)
        say(h.p[0], 41 + second, shipped=(Shipped("tcp", 1, 6000 * 6, "d0"), Shipped("shm", 1, 5000, "d0")))
        rates.sample(h.router.workers)
    assert rates.sent_to("p0") == {}


def test_samples_between_heartbeats_change_nothing() -> None:
    h, rates = RouterHarness(), WorkerRates()
    for second in range(3):
        say(h.d[0], second, output_tokens_computed=10 * second)
        for _ in range(5):
            rates.sample(h.router.workers)
        h.clock.advance(1.0)
    assert rates.of("d0").output_tokens == 10


def test_restarted_worker_counts_anew() -> None:
    h, rates = RouterHarness(), WorkerRates()
    for second in range(3):
        say(h.d[0], second, output_tokens_computed=1000 * second)
        rates.sample(h.router.workers)
        h.clock.advance(1.0)
    second_life = ScriptedWorker(h.router, "d0", "decode", life="second")
    say(second_life, 1, output_tokens_computed=0)
    rates.sample(h.router.workers)
    assert rates.of("d0") == NO_RATES and rates.sent_to("d0") == {}
    h.clock.advance(1.0)
    say(second_life, 2, output_tokens_computed=5)
    rates.sample(h.router.workers)
    assert rates.of("d0").output_tokens == 5


def test_missing_worker_has_no_rates() -> None:
    h, rates = RouterHarness(), WorkerRates()
    for second in range(2):
        say(h.d[0], second, output_tokens_computed=1000 * second)
        rates.sample(h.router.workers)
        h.clock.advance(1.0)
    h.router.lose_worker(h.d[0].worker, "silent", "")
    rates.sample(h.router.workers)
    assert rates.of("d0") == NO_RATES and rates.total(lambda its: its.output_tokens) == 0
