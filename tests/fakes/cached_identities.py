"""The identities of the prefixes in a cache, read from its tree."""

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.radix_cache import RadixNode
from tandem.prefix import prefix_identities


def cached_identities(cache: CacheManager) -> set[int]:
    tree = cache._tree
    found: set[int] = set()
    stack: list[tuple[str, tuple[int, ...], RadixNode]] = [(name, (), root) for name, root in tree._roots.items()]
    while stack:
        namespace, token_ids, node = stack.pop()
        if token_ids:
            found.add(prefix_identities(token_ids, cache.page_size, namespace)[-1])
        stack += [(namespace, (*token_ids, *key), child) for key, child in node.children.items()]
    return found
