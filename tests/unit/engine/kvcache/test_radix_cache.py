"""Eviction from the tree, for any behavior of a policy's keys."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy
from tandem.engine.kvcache.eviction.recency import LeastRecentlyUsed
from tandem.engine.kvcache.radix_cache import RadixCache, RadixNode
from tests.fakes.eviction import EverLater, NeverTheSame, UsesPerTime

POLICIES = (LeastRecentlyUsed, UsesPerTime, NeverTheSame, EverLater)
# Bound of the eviction heap: slack plus entries per page.
HEAP_SLACK, HEAP_PER_PAGE = 64, 4


class Tree:
    """A tree with one token per page, unlocked by default."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.cache = RadixCache(1, policy)
        self.num_added = 0

    def add(self, tokens: Sequence[int]) -> None:
        node = self.cache.match("", tokens, len(tokens))
        root = self.cache.lock_path(node)
        for token in tokens[len(self.cache.path_pages(node)) :]:
            node = self.cache.add_child(node, (token,), self.num_added, 0)
            self.num_added += 1
        self.cache.keep_root("", root)
        self.cache.unlock_path(node)

    def lock(self, tokens: Sequence[int]) -> RadixNode:
        node = self.cache.match("", tokens, len(tokens))
        self.cache.keep_root("", self.cache.lock_path(node))
        return node

    def pass_time(self, ticks: int) -> None:
        if isinstance(self.policy, UsesPerTime):
            self.policy.now += ticks

    def cached(self) -> dict[int, RadixNode]:
        return {node.page_id: node for node in self.cache.nodes()}

    def check(self) -> None:
        nodes = self.cached()
        assert len(nodes) == self.cache.num_pages
        assert self.cache.num_locked_pages == sum(node.num_locks > 0 for node in nodes.values())
        assert len(self.cache._heap) <= HEAP_SLACK + HEAP_PER_PAGE * self.num_added


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PATHS),
    st.tuples(st.just("match"), PATHS),
    st.tuples(st.just("lock"), PATHS),
    st.tuples(st.just("unlock"), st.integers(0, 10)),
    st.tuples(st.just("pass time"), st.integers(1, 50)),
    st.tuples(st.just("evict"), st.integers(1, 12)),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_every_unlocked_page_can_be_evicted(policy: type[EvictionPolicy], actions: list[tuple[str, Any]]) -> None:
    tree = Tree(policy())
    locked: list[RadixNode] = []
    for action, argument in [*actions, ("evict", 10**6)]:
        if action == "unlock" and locked:
            tree.cache.unlock_path(locked.pop(argument % len(locked)))
        elif action == "pass time":
            tree.pass_time(argument)
        elif action == "add":
            tree.add(argument)
        elif action == "match":
            tree.cache.match("", argument, len(argument))
        elif action == "lock":
            locked.append(tree.lock(argument))
        elif action == "evict":
            before = tree.cached()
            num_unlocked = sum(node.num_locks == 0 for node in before.values())
            evicted = tree.cache.evict(argument)
            assert len(evicted) == len(set(evicted)) == min(argument, num_unlocked)
            assert set(before) - set(evicted) == set(tree.cached())
            assert all(before[page].num_locks == 0 and not before[page].children for page in evicted)
        tree.check()


class Scripted(EvictionPolicy):
    def __init__(self) -> None:
        self.keys: dict[int, float] = {}

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (self.keys[node.created],)


def three_pages() -> Tree:
    """Pages 0, 1 and 2, created at times 1, 2 and 3."""
    policy = Scripted()
    policy.keys = {1: 1.0, 2: 2.0, 3: 3.0}
    tree = Tree(policy)
    for token in range(3):
        tree.add([token])
    return tree


def test_increased_key_counts_at_once() -> None:
    tree = three_pages()
    tree.policy.keys |= {1: 2.5, 2: 9.0}
    assert tree.cache.evict(2) == [0, 2]
    assert tree.cache.evict(1) == [1]


def test_decreased_key_counts_after_some_lookups() -> None:
    tree = three_pages()
    tree.policy.keys[3] = 0.0
    for _ in range(HEAP_SLACK + HEAP_PER_PAGE * 3):
        tree.cache.match("", [1], 1)
    assert tree.cache.evict(3) == [2, 0, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_heap_size_is_bounded_by_pages(policy: type[EvictionPolicy]) -> None:
    tree = Tree(policy())
    rng = random.Random(0)
    for step in range(3_000):
        tree.pass_time(1)
        path = [rng.randrange(4) for _ in range(3)]
        if tree.cache.num_pages < 40:
            tree.add(path)
        tree.cache.match("", path, 3)
        if step % 7 == 0:
            tree.cache.evict(rng.randint(1, 3))
        assert len(tree.cache._heap) <= HEAP_SLACK + HEAP_PER_PAGE * 40
    assert len(tree.cache.evict(100)) + tree.cache.num_pages <= 40 and tree.cache.num_pages == 0
