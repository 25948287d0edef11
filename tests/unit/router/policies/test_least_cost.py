import itertools
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.messages import PROTOCOL_VERSION, CachedPrefixes, ForwardTimes, StoreJoin, WorkerStats
from tandem.prefix import prefix_identities
from tandem.router.policies.least_cost import LeastCost
from tandem.router.policies.worker_costs import TIE_COST
from tandem.router.workers.candidates import Candidates, PinnedCandidate
from tandem.router.workers.leans import LEANS, Lean
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.placement import DISAGGREGATED
from tandem.router.workers.rates import START_HANDOVERS
from tandem.router.workers.store_registry import StoreRegistry
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.clock import FakeClock
from tests.fakes.routing import link, make_candidates, routing_request
from tests.fakes.scripted_worker import hello

AIMS = Objectives()


def equals(
    count: int, placement: str = "auto", num_pages: int = 100_000, device: str = "cpu"
) -> tuple[list[Worker], Candidates]:
    """Workers of role `both`, linked to each other."""
    hellos = [hello(f"w{i}", "both", has_links=True, num_pages=num_pages) for i in range(count)]
    workers = [Worker(replace(h, device=device), lambda _: None, lambda _: None, 0.0, 0.0) for h in hellos]
    for worker in workers:
        link(worker, *workers)
    return workers, Candidates({worker.worker_id: worker for worker in workers}, placement=placement)


def caches(worker: Worker, token_ids: Sequence[int]) -> None:
    worker.prefixes.identities.update(prefix_identities(token_ids, worker.page_size, ""))
    worker.prefixes.num_messages += 1


class Served:
    """Calls a policy as the router does, and counts load."""

    def __init__(self, candidates: Candidates) -> None:
        self.clock = FakeClock()
        self.policy = LeastCost(seed=1, clock=self.clock)
        self.candidates = candidates
        self._numbers = itertools.count()

    def start(self, token_ids: Sequence[int]) -> Pair:
        request = routing_request(token_ids, request_id=f"r{next(self._numbers)}")
        pair = self.policy.choose(self.candidates, request)
        self.policy.attempt_started(pair, request)
        assert pair.estimate is not None
        pair.prefill.add_load(1, pair.estimate.num_to_compute)
        pair.decode.add_load(num_decoding=1, num_kv_tokens=len(token_ids))
        return pair

    def would_choose(self, token_ids: Sequence[int], **fields: Any) -> Pair:
        return self.policy.choose(self.candidates, routing_request(token_ids, **fields))


def test_chosen_pair_and_reason_match_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(100):
        workers, candidates = equals(5) if rng.randrange(2) else _fixed_roles(rng)
        prompt = rng.choices(range(1000), k=rng.randrange(1, 3000))
        num_hosts = rng.randrange(1, 4)
        for worker in workers:
            worker.hello = replace(worker.hello, max_batch_size=rng.choice((0, 8, 16)))
            worker.host, worker.rack = f"h{rng.randrange(num_hosts)}", f"r{rng.randrange(2)}"
            worker.add_load(1, rng.randrange(2) * rng.randrange(5000), rng.randrange(20), rng.randrange(200_000))
            num_locked = worker.hello.num_pages - rng.choice((rng.randrange(100), rng.randrange(100_000)))
            times = ForwardTimes(*(rng.random() * most for most in (0.02, 1e-4, 1e-8, 0.02, 1e-3, 1e-7, 0.05)))
            worker.take_stats(WorkerStats(num_locked_pages=max(0, num_locked), forward_times=times))
            worker.set_lean(rng.choice(LEANS))
            if rng.randrange(2):
                caches(worker, prompt[: rng.randrange(len(prompt) + 1)])
        if rng.randrange(2):
            _give_stores(workers, prompt, rng)
        candidates.spans_hosts = num_hosts > 1
        pair = LeastCost(seed=0).choose(candidates, routing_request(prompt))
        cached = {worker: _num_cached(worker, prompt) for worker in workers}
        loads = {worker: _best_load(worker, prompt, cached[worker]) for worker in workers}
        parts = {p: _parts(p, len(prompt), cached, *loads[p.prefill]) for p in candidates}
        costs = {p: sum(parts[p].values()) for p in candidates}
        assert costs[pair] <= min(costs.values()) + 2 * TIE_COST
        assert pair.estimate is not None
        assert pair.estimate.num_to_compute == len(prompt) - loads[pair.prefill][0]
        others = [other for other in candidates if other.placement != pair.placement]
        # Random tie costs decide between the cheapest pairs.
        near = [other for other in others if costs[other] <= min(map(costs.__getitem__, others)) + 2 * TIE_COST]
        gains = [{name: part - parts[pair][name] for name, part in parts[other].items()} for other in near]
        assert pair.estimate.reason in [max(gain, key=gain.__getitem__) for gain in gains] or ["only"]


def _fixed_roles(rng: random.Random) -> tuple[list[Worker], Candidates]:
    candidates = make_candidates(rng.randrange(1, 4), rng.randrange(1, 4))
    return list({w: None for pair in candidates for w in (pair.prefill, pair.decode)}), candidates


def _num_cached(worker: Worker, prompt: Sequence[int]) -> int:
    known = 0
    for identity in prefix_identities(prompt, worker.page_size, ""):
        if identity not in worker.prefixes.identities:
            break
        known += worker.page_size
    return known


def _give_stores(workers: Sequence[Worker], prompt: Sequence[int], rng: random.Random) -> None:
    """Gives each host a store with the first pages of the prompt in memory and more on disk."""
    registry = StoreRegistry(FakeClock(), 1.0)
    identities = prefix_identities(prompt, workers[0].page_size, "")
    for host in {worker.host for worker in workers}:
        store = registry.connect(StoreJoin(PROTOCOL_VERSION, host, "", host), lambda _: None, lambda _: None)
        ends = sorted(rng.randrange(len(identities) + 1) for _ in range(2))
        for tier, end in enumerate(ends):
            registry.receive(store, CachedPrefixes(tier, tier == 0, array("Q", identities[:end]).tobytes(), tier=tier))
    for worker in workers:
        worker.node_store = registry.node(worker.host)
        rates = tuple(rng.choice((0.0, rng.random() * 1e-4)) for _ in range(3))
        worker.take_stats(replace(worker.stats, load_token_s=rng.choice(((), rates))))


def _best_load(worker: Worker, prompt: Sequence[int], num_cached: int) -> tuple[int, float]:
    """Returns the leading tokens that need no computing, and the seconds to load some of them, at least cost."""
    length, size = len(prompt), worker.page_size
    stores = [worker.node_store.prefixes, *worker.node_store.everywhere]
    best, seconds = (num_cached, 0.0), 0.0
    for page, identity in enumerate(prefix_identities(prompt, size, "")[: (length - 1) // size]):
        if page * size < num_cached:
            continue
        tiers = [
            min(2 * is_other + tier, 2)
            for is_other, store in enumerate(stores)
            for tier in range(2)
            if store is not None and identity in store.tiers[tier]
        ]
        if not tiers or not worker.load_token_s or not worker.load_token_s[min(tiers)]:
            break
        seconds += size * worker.load_token_s[min(tiers)]
        option = (page + 1) * size, seconds
        if _prompt_cost(worker, length, *option) < _prompt_cost(worker, length, *best):
            best = option
    return best


def _prompt_cost(worker: Worker, length: int, num_ready: int, load_s: float) -> float:
    parts = _parts(Pair(worker, worker), length, {worker: 0}, num_ready, load_s)
    return sum(parts[name] for name in ("queue", "load", "compute", "interference", "role"))


def _parts(pair: Pair, length: int, cached: dict[Worker, int], num_ready: int, load_s: float) -> dict[str, float]:
    """A pair's cost by the formulas of docs/placement.md."""
    p, d = pair.prefill, pair.decode
    big_t, i = AIMS.ttft_s, AIMS.itl_s
    x, to_store, o = length - num_ready, length - cached[d], 128.0

    f, s = p.forward_times, d.forward_times
    queue_s = f.prompt_token_s * p.num_pending_tokens
    computing_s = f.prompt_token_s * x + f.attended_token_s * x * (length - x / 2)
    queue = _late(queue_s / big_t)
    waited = _late(max(queue_s, load_s) / big_t)
    first_token = _late((max(queue_s, load_s) + f.prefill_s + computing_s) / big_t)
    delayed = p.num_decoding * computing_s / (o * i) * (1 + _miss(f, i))

    n, k = d.num_decoding, d.num_kv_tokens
    empty_step_s = s.step_s + s.request_s * n + s.kv_token_s * k
    step_s = empty_step_s + s.request_s
    batch = _late((step_s + s.kv_token_s * length) / i)
    batch += (5 if step_s > i else 1) * n * (s.request_s + s.kv_token_s * length) / i
    max_batch = d.hello.max_batch_size
    if max_batch and n + 1 > max_batch:
        batch += _late((n + 1 - max_batch) / max_batch * o * step_s / big_t)
    memory = 0.0
    held = d.stats.num_locked_pages * d.page_size
    lacking = to_store - (d.hello.num_pages * d.page_size - held)
    if lacking > 0 and held:
        memory = _late(min(1.0, lacking / held) * o * empty_step_s / big_t)

    handover = 0.0
    if p is not d:
        distance = 0 if p.host == d.host else 1 if p.rack == d.rack else 2
        fixed_s, page_s = START_HANDOVERS["cpu"][distance]
        handover = (fixed_s + page_s * to_store / d.page_size) / big_t
    return {
        "queue": queue,
        "load": waited - queue,
        "compute": first_token - waited + computing_s / big_t,
        "interference": delayed + s.prompt_token_s * d.num_pending_tokens / (o * i) * (1 + _miss(s, i)),
        "role": {"both": 1.5, "decode": 5.0}.get(p.lean, 0.0) * computing_s / big_t
        + {"both": 0.7, "prefill": 3.0}.get(d.lean, 0.0),
        "batch": batch,
        "memory": memory,
        "handover": handover,
    }


def _late(share: float) -> float:
    return share + 4 * max(0.0, share - 1)


def _miss(times: ForwardTimes, itl_s: float) -> float:
    return max(0.0, 1 - itl_s / times.gap_beside_prompts_s) / 0.05


def test_idle_cluster_needs_no_handover() -> None:
    pair = Served(equals(3)[1]).would_choose(range(100))
    assert pair.prefill is pair.decode
    assert pair.estimate is not None and pair.estimate.reason == "handover"
    times = pair.prefill.forward_times
    expected = times.prefill_s + 100 * times.prompt_token_s + 5000 * times.attended_token_s
    assert pair.estimate.ttft_s == pytest.approx(expected)


def test_long_prompt_avoids_decoding_workers() -> None:
    workers, candidates = equals(2)
    workers[0].add_load(num_decoding=8, num_kv_tokens=8_000)
    pair = Served(candidates).would_choose(range(400))
    assert pair.prefill is workers[1]
    busy = workers[1]
    busy.add_load(num_decoding=60, num_kv_tokens=60_000)
    pair = Served(candidates).would_choose(range(400))
    assert (pair.prefill, pair.decode) != (busy, busy)


def test_next_turn_follows_its_cache_unless_queued() -> None:
    workers, candidates = equals(4)
    turn = range(2_000)
    caches(workers[2], turn[:1_900])
    served = Served(candidates)
    pair = served.would_choose(turn)
    assert (pair.prefill, pair.decode) == (workers[2], workers[2])
    assert pair.estimate is not None
    assert (pair.estimate.num_to_compute, pair.estimate.num_elsewhere) == (100, 2_000)
    workers[2].add_load(num_pending_tokens=5_000)
    assert served.would_choose(turn).prefill is not workers[2]


@pytest.mark.parametrize(
    ("cached", "num_elsewhere"),
    [((1_000, 1_900, 1_000), 1_000), ((0, 1_900, 1_900), 100), ((0, 1_000, 1_900, 0), 2_000), ((1_900, 0), 2_000)],
)
def test_tokens_to_compute_at_half_of_the_workers(cached: tuple[int, ...], num_elsewhere: int) -> None:
    workers, candidates = equals(len(cached))
    prompt = range(2_000)
    for worker, num_cached in zip(workers, cached, strict=True):
        if num_cached:
            caches(worker, prompt[:num_cached])
    estimate = Served(candidates).would_choose(prompt).estimate
    assert estimate is not None and (estimate.num_to_compute, estimate.num_elsewhere) == (100, num_elsewhere)


@pytest.mark.parametrize("placement", ["auto", "aggregated", DISAGGREGATED])
def test_few_workers_compute_a_new_shared_prefix(placement: str) -> None:
    workers, candidates = equals(8, placement, device="cuda")
    served = Served(candidates)
    for number in range(24):
        served.start([*range(2_000), *([number] * 20)])
    # No prompt can start from an arriving prefix.
    computed = sum(worker.num_pending_tokens for worker in workers)
    assert computed < 2 * 2_000 + 24 * (20 + 4)


def test_unrelated_requests_are_spread() -> None:
    workers, candidates = equals(8)
    served = Served(candidates)
    for number in range(24):
        served.start([number] * 500)
    assert {worker.num_pending_tokens for worker in workers} == {1_500}


def test_placement_is_kept_while_possible() -> None:
    workers, candidates = equals(2, DISAGGREGATED)
    served = Served(candidates)
    pair = served.would_choose(range(100))
    assert pair.prefill is not pair.decode
    assert pair.estimate is not None and pair.estimate.reason == "only"
    assert not candidates.among(lambda worker: worker is workers[0])
    for worker, other in (workers, workers[::-1]):
        del worker.decode_workers[other.worker_id]
    alone = Served(Candidates({w.worker_id: w for w in workers}, placement=DISAGGREGATED)).would_choose(range(100))
    assert alone.prefill is alone.decode
    _, together = equals(2, "aggregated")
    for _ in range(10):
        pair = Served(together).start(range(1_000))
        assert pair.prefill is pair.decode


def test_full_pool_is_avoided() -> None:
    workers, candidates = equals(2, "aggregated", num_pages=1_000)
    workers[0].take_stats(WorkerStats(num_locked_pages=900))
    for worker in workers:
        worker.add_load(num_decoding=1)
    workers[1].add_load(num_pending_tokens=20)
    assert Served(candidates).would_choose(range(1_000)).decode is workers[1]
    # Cached pages not in use make room.
    workers[0].take_stats(WorkerStats(num_cached_pages=900))
    assert Served(candidates).would_choose(range(1_000)).decode is workers[0]
    # Leased pages and arriving tokens do not.
    workers[0].take_stats(WorkerStats(num_leased_pages=900))
    assert Served(candidates).would_choose(range(1_000)).decode is workers[1]
    workers[0].take_stats(WorkerStats())
    workers[0].add_load(num_arriving_tokens=3_600)
    assert Served(candidates).would_choose(range(1_000)).decode is workers[1]


def test_shared_prefix_takes_memory_once() -> None:
    workers, candidates = equals(2, "aggregated", num_pages=1_000, device="cuda")
    shared = list(range(2_000))
    caches(workers[0], shared)
    # The pool fits this prompt's own part, but not all prompts in decode.
    workers[0].add_load(num_decoding=5, num_kv_tokens=10_500)
    workers[0].take_stats(WorkerStats(num_locked_pages=625))
    pair = Served(candidates).would_choose([*shared, *range(5_000, 5_100)])
    assert pair.decode is workers[0]
    assert pair.estimate is not None and pair.estimate.num_to_store == 100


def test_objectives_weigh_steps_against_queue() -> None:
    workers, candidates = equals(2, "aggregated")
    workers[0].add_load(num_decoding=6)
    workers[1].add_load(num_pending_tokens=300)
    tight_itl, tight_ttft = Objectives(60.0, 0.02), Objectives(0.1, 60.0)
    assert Served(candidates).would_choose(range(8), objectives=tight_itl).decode is workers[1]
    assert Served(candidates).would_choose(range(8), objectives=tight_ttft).decode is workers[0]


def test_slower_worker_gets_less() -> None:
    workers, candidates = equals(2)
    served = Served(candidates)
    times = workers[0].forward_times
    workers[0].take_stats(WorkerStats(forward_times=replace(times, prompt_token_s=3 * times.prompt_token_s)))
    for number in range(8):
        served.start([number] * 500)
    slow, fast = (worker.num_pending_tokens for worker in workers)
    assert 0 < slow < fast / 2
    workers[0].take_stats(WorkerStats(forward_times=times))
    assert served.would_choose([8] * 500).prefill is workers[0]
    workers[0].take_stats(WorkerStats())
    assert workers[0].forward_times == times


def test_equal_workers_are_chosen_at_random() -> None:
    candidates = make_candidates(8, 8)
    pairs = [LeastCost(seed=seed).choose(candidates, routing_request(range(100))) for seed in range(32)]
    assert len({pair.prefill for pair in pairs}) > 4 and len({pair.decode for pair in pairs}) > 4


def test_leaning_workers_come_first() -> None:
    workers, candidates = equals(3, device="cuda")
    leans: tuple[Lean, ...] = ("prefill", "both", "decode")
    for worker, lean in zip(workers, leans, strict=True):
        worker.set_lean(lean)
    served = Served(candidates)
    pair = served.start(range(4000))
    assert [pair.prefill, pair.decode] == [workers[0], workers[2]]
    assert pair.estimate is not None
    assert pair.estimate.reason == "role"
    # Overflow goes to the next lean, and last to the opposite one.
    prefills = [served.start(range(i, i + 4000)).prefill for i in range(1, 30)]
    assert prefills.index(workers[1]) < prefills.index(workers[2])


def test_equal_leans_change_nothing() -> None:
    chosen = []
    for lean in ("none", "both"):
        workers, candidates = equals(3, device="cuda")
        for worker in workers:
            worker.set_lean(lean)
        served = Served(candidates)
        pairs = [served.start(range(i, i + 2000)) for i in range(12)]
        chosen.append([(pair.prefill.worker_id, pair.decode.worker_id) for pair in pairs])
    assert chosen[0] == chosen[1]


def test_a_stored_prefix_draws_a_prompt_to_its_node() -> None:
    workers, candidates = equals(2)
    candidates.spans_hosts = True
    prompt = range(400)
    for worker, host in zip(workers, "ab", strict=True):
        worker.host = host
    registry = StoreRegistry(FakeClock(), 1.0)
    store = registry.connect(StoreJoin(PROTOCOL_VERSION, "s", "", "b"), lambda _: None, lambda _: None)
    identities = prefix_identities(prompt, 4, "")
    registry.receive(store, CachedPrefixes(0, True, array("Q", identities).tobytes()))
    for worker in workers:
        worker.node_store = registry.node(worker.host)
        worker.take_stats(WorkerStats(load_token_s=(1e-5, 0.0, 0.0)))
    served = Served(candidates)
    pair = served.would_choose(prompt)
    assert pair.prefill is workers[1]
    assert pair.estimate is not None
    assert (pair.estimate.num_to_compute, pair.estimate.num_elsewhere) == (4, 400)
    # Loading is no use to a worker that would compute sooner.
    for worker in workers:
        worker.take_stats(WorkerStats(load_token_s=(1.0, 0.0, 0.0)))
    estimate = served.would_choose(prompt).estimate
    assert estimate is not None and estimate.num_to_compute == 400


def test_the_given_pair_of_a_move_is_chosen_without_a_link() -> None:
    workers, _ = equals(2)
    for worker in workers:
        worker.decode_workers.clear()
    pair = LeastCost(seed=1).choose(PinnedCandidate(Pair(workers[0], workers[1])), routing_request(range(100)))
    assert (pair.prefill, pair.decode) == (workers[0], workers[1])
