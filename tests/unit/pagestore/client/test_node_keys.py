"""Keys of pages in the tree and of prompts."""

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.pagestore.client.node_keys import HASHES_PER_TURN, NodeKeys
from tandem.pagestore.keys import root_key
from tandem.prefix import adapted_namespace
from tests.fakes.store_tier import FORMAT, SIZE, keys_of, tokens

MANY = tokens(HASHES_PER_TURN + 10)


def test_pages_in_the_tree_are_hashed_once_over_several_turns() -> None:
    cache = CacheManager(len(MANY), SIZE)
    handle = cache.acquire_pages(MANY, len(MANY), max_cached_len=0, namespace="tenant")
    assert handle is not None
    cache.cache_pages(handle, MANY, len(MANY))
    keys = NodeKeys(cache, FORMAT)
    node = cache.find_cached(MANY, "tenant").node
    assert node is not None
    assert keys.of(node) is None and keys.num_left == 0
    keys.begin_turn()
    assert keys.of(node) == keys_of(MANY, "tenant")[-1]
    assert keys.num_left == HASHES_PER_TURN - 10
    assert node.parent is not None and keys.of(node.parent) == keys_of(MANY, "tenant")[-2]
    assert keys.num_left == HASHES_PER_TURN - 10
    root = node
    while root.parent is not None:
        root = root.parent
    assert keys.of(root) == root_key(FORMAT, "tenant") == keys.root("tenant")


def test_keys_of_a_prompt_continue_in_the_next_turn() -> None:
    keys = NodeKeys(CacheManager(4, SIZE), FORMAT)
    expected = keys_of(MANY)
    found: list[bytes] = []
    num_pages = len(expected)
    assert not keys.extend(found, expected[1], MANY, 2, num_pages)
    assert found == expected[2 : 2 + HASHES_PER_TURN]
    keys.begin_turn()
    assert keys.extend(found, expected[1], MANY, 2, num_pages)
    assert found == expected[2:]
    assert keys.extend(found, expected[1], MANY, 2, num_pages)
    assert keys.num_left == HASHES_PER_TURN - (num_pages - 2 - HASHES_PER_TURN)


def test_keys_cover_the_adapter_and_not_its_name() -> None:
    keys = NodeKeys(CacheManager(4, 2), FORMAT)
    assert keys.root(adapted_namespace("tenant", "ab12")) == root_key(FORMAT, "tenant", "ab12")
    assert keys.root("tenant") == root_key(FORMAT, "tenant")
