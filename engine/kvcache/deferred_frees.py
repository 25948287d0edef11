"""Decides when a page may be reused: once no launched operation can still touch it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.engine.kvcache.allocator import PageAllocator
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.engine.kvcache.radix_cache import RadixCache, RadixNode


@dataclass(slots=True)
class DeferredFree:
    """Pages to free when the `pending` operations have ended.

    Attributes:
        node: end of a path in the tree to unlock then.
        held: pages counted under the ceiling until then.
    """

    page_ids: Sequence[int]
    node: RadixNode | None
    pending: list[Completion]
    ceiling: PageCeiling | None = None
    held: Sequence[int] = ()


class DeferredFrees:
    """The only way by which pages leave a request."""

    def __init__(self, tree: RadixCache, allocator: PageAllocator) -> None:
        self._tree = tree
        self._allocator = allocator
        self._waiting: list[DeferredFree] = []

    def __iter__(self) -> Iterator[DeferredFree]:
        return iter(self._waiting)

    def add(self, deferred: DeferredFree) -> None:
        """Frees the pages, at once if nothing is pending."""
        deferred.pending = [c for c in deferred.pending if not c.done()]
        if deferred.pending:
            self._waiting.append(deferred)
            return
        if deferred.node is not None:
            self._tree.unlock_path(deferred.node)
        if deferred.ceiling is not None:
            deferred.ceiling.let_go(deferred.held)
        self._allocator.free(deferred.page_ids)

    def free_done(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for deferred in waiting:
                self.add(deferred)
