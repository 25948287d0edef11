"""Policies based on the radix tree's contents."""

from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.prefill_worker.policies.base import PrefillPolicy
from tandem.prefill_worker.queued_request import QueuedRequest


class LongestPrefixMatch(PrefillPolicy):
    """Longest cached prefix first, before it is evicted."""

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return sorted(queue, key=lambda q: len(cache.peek(q.token_ids, q.request.cache_namespace)), reverse=True)


class _Branch:
    """A cached page, with the requests whose match ends there."""

    __slots__ = ("branches", "ending", "weight")

    def __init__(self) -> None:
        self.branches: dict[int, _Branch] = {}
        self.ending: list[QueuedRequest] = []
        self.weight = 0


class DfsWeight(PrefillPolicy):
    """Depth first through the cached prefixes, the branch with the most requests first: requests that share pages run
    together."""

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        root = _Branch()
        for queued in queue:
            branch = root
            for page_id in cache.peek(queued.token_ids, queued.request.cache_namespace):
                branch = branch.branches.setdefault(page_id, _Branch())
                branch.weight += 1
            branch.ending.append(queued)
        ordered: list[QueuedRequest] = []
        stack = [root]
        while stack:
            branch = stack.pop()
            ordered += branch.ending
            # The heaviest branch, and among equals the oldest, on top.
            heaviest_first = sorted(branch.branches.values(), key=lambda b: -b.weight)
            stack.extend(reversed(heaviest_first))
        return ordered
