import random
from array import array
from collections.abc import Sequence

from tandem.messages import CachedPrefixes, WorkerStats
from tandem.prefix import prefix_identities
from tandem.router.policies.cost_model import Speed, compute_s
from tandem.router.policies.loads import LoadOption, load_options
from tandem.router.workers.store_prefixes import StorePrefixes
from tandem.router.workers.worker import Worker
from tests.fakes.routing import routing_request
from tests.fakes.scripted_worker import hello

# Of tests.fakes.scripted_worker.hello.
PAGE_SIZE = 4


def worker_with(
    load_token_s: tuple[float, ...], host: int, disk: int = 0, token_ids: Sequence[int] = range(40)
) -> Worker:
    """A worker whose node stores the first pages of `token_ids` in memory and on disk."""
    worker = Worker(hello("w", "both"), lambda _: None, lambda _: None, 0.0, 0.0)
    worker.take_stats(WorkerStats(load_token_s=load_token_s))
    worker.node_store.prefixes = prefixes = StorePrefixes(lambda: 10**6)
    identities = prefix_identities(token_ids, PAGE_SIZE, "")
    for tier, count in enumerate((host, disk)):
        prefixes.receive(CachedPrefixes(tier, tier == 0, array("Q", identities[:count]).tobytes(), tier=tier))
    return worker


def options_of(worker: Worker, token_ids: Sequence[int] = range(40), num_cached: int = 0) -> list[LoadOption]:
    identities = {PAGE_SIZE: prefix_identities(token_ids, PAGE_SIZE, "")}
    cached = {worker: num_cached} if num_cached else {}
    return load_options([worker], routing_request(token_ids), cached, identities).get(worker, [])


def test_each_run_ends_an_option() -> None:
    worker = worker_with((0.5, 2.0), host=3, disk=5)
    assert options_of(worker) == [LoadOption(12, 6.0), LoadOption(20, 22.0)]
    assert options_of(worker, num_cached=4) == [LoadOption(12, 4.0), LoadOption(20, 20.0)]
    assert options_of(worker, num_cached=20) == []


def test_one_token_is_computed() -> None:
    worker = worker_with((1.0,), host=10)
    assert options_of(worker) == [LoadOption(36, 36.0)]
    assert options_of(worker, range(41)) == [LoadOption(40, 40.0)]


def test_a_worker_without_a_tier_does_not_load_from_it() -> None:
    assert options_of(worker_with((), host=3)) == []
    assert options_of(worker_with((0.5, 0.0), host=3, disk=5)) == [LoadOption(12, 6.0)]
    assert options_of(worker_with((0.5,), host=3, disk=5)) == [LoadOption(12, 6.0)]


def test_the_best_option_is_the_best_of_all_lengths() -> None:
    chance = random.Random(0)
    for _ in range(300):
        num_tokens = chance.randrange(1, 200)
        token_ids = chance.choices(range(50), k=num_tokens)
        rates = tuple(chance.random() * 2e-4 for _ in range(2))
        num_host = chance.randrange(51)
        worker = worker_with(rates, num_host, chance.randrange(51), token_ids)
        num_cached = PAGE_SIZE * chance.randrange(num_tokens // PAGE_SIZE + 1)
        speed = Speed(worker.forward_times)
        identities = prefix_identities(token_ids, PAGE_SIZE, "")

        def total_s(option: LoadOption, speed: Speed = speed, num_tokens: int = num_tokens) -> float:
            return option.seconds + compute_s(speed, num_tokens - option.num_ready, num_tokens)

        every = [LoadOption(num_cached, 0.0)]
        assert worker.node_store.prefixes is not None
        for page in range(num_cached // PAGE_SIZE, (num_tokens - 1) // PAGE_SIZE):
            holders = [tier for tier, known in enumerate(worker.node_store.prefixes.tiers) if identities[page] in known]
            if not holders:
                break
            ready, seconds = every[-1]
            every.append(LoadOption(ready + PAGE_SIZE, seconds + PAGE_SIZE * rates[holders[0]]))
        offered = [every[0], *options_of(worker, token_ids, num_cached)]
        assert abs(min(map(total_s, offered)) - min(map(total_s, every))) < 1e-9
