"""Eviction order of each policy in the table and of a custom one."""

import pytest

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy
from tandem.engine.kvcache.eviction.table import EVICTION_POLICIES


class MostFrequentlyUsed(EvictionPolicy):
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (-node.num_hits,)


def cache_prompt(cache: CacheManager, tokens: list[int], priority: int = 0) -> None:
    handle = cache.acquire_pages(tokens, len(tokens), max_cached_len=len(tokens), priority=priority)
    assert handle is not None
    cache.cache_pages(handle, tokens, len(tokens))
    cache.release_pages(handle)


def eviction_order(policy: str) -> str:
    cache = CacheManager(4, 2, policy)
    prompts = {name: [ord(name), 0] for name in "abcd"}
    for name, priority in (("a", 5), ("b", 9), ("c", 0)):
        cache_prompt(cache, prompts[name], priority)
    for name in "aacbcb":
        cache.touch(prompts[name])
    cache_prompt(cache, prompts["d"])
    for name in "ca":
        cache.touch(prompts[name])
    # a and c have 3 hits, b 2, d none; the accesses were b, then d's creation, then c and a.
    evicted: list[str] = []
    for n in range(4):
        assert cache.acquire_pages([1000 + n, 0], 2, max_cached_len=0) is not None
        evicted += [name for name in "abcd" if name not in evicted and not cache.peek(prompts[name])]
    return "".join(evicted)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", "bdca"), ("mru", "acdb"), ("fifo", "abcd"), ("lfu", "dbca"), ("priority", "dcab")],
)
def test_order(policy: str, order: str) -> None:
    assert eviction_order(policy) == order


def test_custom_policy_is_loaded_by_import_path() -> None:
    order = eviction_order(f"{__name__}:{MostFrequentlyUsed.__name__}")
    assert order.index("b") < order.index("d") and set(order[:2]) == {"a", "c"}


def test_invalid_policies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"PageAllocator must be a class that derives from .*\.EvictionPolicy"):
        CacheManager(4, 2, "tandem.engine.kvcache.allocator:PageAllocator")


@pytest.mark.parametrize("policy", EVICTION_POLICIES.names)
def test_leaves_are_evicted_before_their_parents(policy: str) -> None:
    cache = CacheManager(4, 2, policy)
    cache_prompt(cache, [1, 2, 3, 4, 5, 6])
    assert cache.acquire_pages([9, 9, 9, 9], 4, max_cached_len=0) is not None
    assert len(cache.peek([1, 2, 3, 4, 5, 6])) == 2
