"""Routing policies and the router's prefix index."""

from collections import Counter

import pytest

from router.policies.base import Prompt, RoutingPolicy
from router.policies.cache_aware import CacheAware
from router.policies.power_of_two import PowerOfTwo
from router.policies.round_robin import RoundRobin
from router.policies.table import ROUTING_POLICIES
from router.prefix_index import PrefixIndex
from router.worker_registry import Pair, Worker
from tandem.prefix import prefix_identities
from tests.fakes.scripted_worker import hello


def workers(role: str, count: int) -> list[Worker]:
    return [Worker(hello(f"{role}{i}", role), lambda _: None, lambda _: None, 0.0, 0.0) for i in range(count)]


def pairs(num_prefill: int, num_decode: int) -> list[Pair]:
    decodes = workers("decode", num_decode)
    return [Pair(p, d) for p in workers("prefill", num_prefill) for d in decodes]


def assign(pair: Pair, num_tokens: int = 0) -> Pair:
    pair.prefill.num_assigned += 1
    pair.decode.num_assigned += 1
    pair.prefill.num_pending_tokens += num_tokens
    return pair


def chosen(policy: RoutingPolicy, candidates: list[Pair], count: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for i in range(count):
        pair = assign(policy.choose(candidates, Prompt([i])))
        counts.update([pair.prefill.worker_id, pair.decode.worker_id])
    return counts


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 2), (1, 3), (3, 2)])
def test_load_is_spread_evenly(policy: str, num_prefill: int, num_decode: int) -> None:
    counts = chosen(ROUTING_POLICIES.load(policy)(), pairs(num_prefill, num_decode), 60)
    assert {counts[f"prefill{i}"] for i in range(num_prefill)} == {60 // num_prefill}
    assert {counts[f"decode{i}"] for i in range(num_decode)} == {60 // num_decode}


def test_round_robin_ignores_load() -> None:
    candidates = pairs(2, 2)
    candidates[0].prefill.num_assigned = 100
    assert chosen(RoundRobin(), candidates, 20)["prefill0"] == 10


def test_two_choices_are_nearly_even() -> None:
    counts = chosen(PowerOfTwo(seed=1), pairs(4, 4), 400)
    assert max(counts.values()) - min(counts.values()) <= 12
    only = pairs(1, 1)
    assert PowerOfTwo(seed=1).choose(only, Prompt([1])) is only[0]


def test_a_prefix_goes_where_it_is_cached() -> None:
    policy, candidates = CacheAware(), pairs(3, 3)
    prompts = {name: [ord(name)] * 400 for name in "abc"}
    homes = {name: assign(policy.choose(candidates, Prompt(p)), 400) for name, p in prompts.items()}
    assert len({h.prefill.worker_id for h in homes.values()}) == 3
    for worker in (*(p.prefill for p in candidates), *(p.decode for p in candidates)):
        worker.num_assigned = worker.num_pending_tokens = 0
    for name, prompt in prompts.items():
        assert policy.choose(candidates, Prompt([*prompt, 7, 7, 7, 7])) is homes[name]


def test_a_cached_prefix_is_not_worth_a_long_queue() -> None:
    policy, candidates = CacheAware(), pairs(2, 1)
    prompt = Prompt(list(range(400)))
    home = policy.choose(candidates, prompt)
    home.prefill.num_pending_tokens = 300
    assert policy.choose(candidates, prompt) is home
    home.prefill.num_pending_tokens = 500
    assert policy.choose(candidates, prompt) is not home


def test_the_decode_worker_s_cache_counts_too() -> None:
    policy, candidates = CacheAware(), pairs(1, 2)
    first, second = candidates
    policy.finished(second, Prompt(list(range(4000))))
    assert policy.choose(candidates, Prompt(list(range(4000)))) is second
    second.decode.num_assigned = 100
    assert policy.choose(candidates, Prompt(list(range(4000)))) is first


def test_namespaces_do_not_attract_each_other() -> None:
    policy, candidates = CacheAware(), pairs(2, 1)
    tokens = list(range(400))
    home = policy.choose(candidates, Prompt(tokens, "one"))
    home.prefill.num_pending_tokens = 10
    assert policy.choose(candidates, Prompt(tokens, "one")) is home
    assert policy.choose(candidates, Prompt(tokens, "two")) is not home


def test_the_index_knows_leading_pages_and_forgets_the_oldest() -> None:
    index = PrefixIndex(max_entries=10)
    long, other = prefix_identities(range(32), 4, ""), prefix_identities(range(100, 116), 4, "")
    index.insert("w", long)
    assert index.num_pages("w", long) == 8
    assert index.num_pages("w", [*long[:3], *other]) == 3
    assert index.num_pages("v", long) == 0
    index.insert("w", other)
    assert len(index) == 10
    # What is forgotten of a prefix is its end.
    assert index.num_pages("w", long) == 6 and index.num_pages("w", other) == 4


def test_identities_are_chained() -> None:
    a, b = prefix_identities([1, 2, 3, 4, 5], 2, ""), prefix_identities([9, 9, 3, 4], 2, "")
    assert len(a) == len(b) == 2
    assert a[1] != b[1]
    assert prefix_identities([1, 2], 2, "x") != a[:1]


def test_every_policy_has_a_name() -> None:
    for name in ROUTING_POLICIES.names:
        candidates = pairs(2, 2)
        assert ROUTING_POLICIES.load(name)().choose(candidates, Prompt([1, 2, 3])) in candidates
    with pytest.raises(ValueError, match="best cannot be imported"):
        ROUTING_POLICIES.load("best")()
