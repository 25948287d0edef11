from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Prefill
from tandem.prefill_worker.policies.cache_aware import DfsWeight, LongestPrefixMatch
from tandem.prefill_worker.queued_request import QueuedRequest
from tandem.sampling_params import SamplingParams

PAGE_SIZE = 2


def cache_with(*prompts: list[int], namespace: str = "") -> CacheManager:
    cache = CacheManager(64, PAGE_SIZE)
    for prompt in prompts:
        handle = cache.acquire_pages(prompt, len(prompt), max_cached_len=len(prompt), namespace=namespace)
        assert handle is not None
        cache.cache_pages(handle, prompt, len(prompt))
        cache.release_pages(handle)
    return cache


def queue_of(*prompts: list[int], namespace: str = "") -> list[QueuedRequest]:
    prefills = [
        Prefill(f"r{i}", 0, tuple(p), (), SamplingParams(4), "d", 0, 0, namespace) for i, p in enumerate(prompts)
    ]
    return [QueuedRequest(prefill, i, list(prefill.prompt_ids), 2) for i, prefill in enumerate(prefills)]


def numbers(order: Sequence[QueuedRequest]) -> list[int]:
    return [q.number for q in order]


def test_longest_cached_prefix_goes_first_then_the_oldest() -> None:
    cache = cache_with([1, 1, 2, 2, 3, 3])
    queue = queue_of([9, 9], [1, 1, 9, 9], [1, 1, 2, 2, 9, 9], [1, 1, 8, 8])
    assert numbers(LongestPrefixMatch().order(queue, cache)) == [2, 1, 3, 0]


def test_other_namespaces_pages_do_not_count() -> None:
    cache = cache_with([1, 1, 2, 2], namespace="other")
    queue = queue_of([9, 9], [1, 1, 2, 2, 9, 9])
    assert numbers(LongestPrefixMatch().order(queue, cache)) == [0, 1]


def test_heaviest_branch_goes_first() -> None:
    cache = cache_with([1, 1, 2, 2], [1, 1, 3, 3], [5, 5, 6, 6])
    light, left, right = [5, 5, 6, 6, 9], [1, 1, 2, 2, 9], [1, 1, 3, 3, 9]
    queue = queue_of(light, left, right, [7, 7, 9], [*right, 8], light)
    # First the uncached one, at the root; then the three below [1, 1], with two on one branch first.
    assert numbers(DfsWeight().order(queue, cache)) == [3, 2, 4, 1, 0, 5]
