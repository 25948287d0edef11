"""Pages that a node's page store reports."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from tandem.messages import CachedPrefixes
from tandem.prefix import unpack_identities
from tandem.router.workers.identity_set import IdentitySet
from tandem.router.workers.prefix_report import PrefixReport

# A store's own tiers, in order of load time (tandem.pagestore.messages): memory and disk. The third is other stores.
NUM_OWN_TIERS = 2
PEER = 2


class StorePrefixes(PrefixReport):
    """Pages of one life of a store.

    Attributes:
        tiers: identities of the pages in each tier; a page may be in both.
    """

    __slots__ = ("_room", "tiers")

    def __init__(self, room: Callable[[], int]) -> None:
        """Args: room: number of further identities that the router may keep. It ignores others: their pages count as
        computed."""
        super().__init__()
        self._room = room
        self.clear()

    def clear(self) -> None:
        self.tiers = tuple(IdentitySet() for _ in range(NUM_OWN_TIERS))

    def _apply(self, message: CachedPrefixes) -> None:
        if message.tier >= NUM_OWN_TIERS:
            raise ValueError(f"tier {message.tier} of a page store is unknown")
        identities = self.tiers[message.tier]
        identities.difference_update(unpack_identities(message.removed))
        identities.update(unpack_identities(message.stored), self._room())

    def __len__(self) -> int:
        return sum(map(len, self.tiers))

    def holds(self, identity: int) -> bool:
        return any(identity in tier for tier in self.tiers)


# Tier of a run of pages, and the index behind its last page.
Run = tuple[int, int]


def find_runs(
    store: StorePrefixes | None, peers: "PeerRuns | None", identities: Sequence[int], start: int, stop: int
) -> list[Run]:
    """Returns the runs of pages from `start` on that a worker can load, each from the fastest tier that has it.

    A tier that has a page of a prompt mostly has the pages between, so the end of a run is found by binary search.

    Args:
        store: of the worker's node.
        peers: pages of all stores, if the worker loads from others.
    """
    runs: list[Run] = []
    tiers = store.tiers if store is not None else ()
    while start < stop:
        first = identities[start]
        tier = next((tier for tier, known in enumerate(tiers) if first in known), PEER)
        if tier != PEER:
            start = _end(tiers[tier].__contains__, identities, start, stop)
        else:
            end = peers.end(start) if peers is not None else start
            if end == start:
                return runs
            start = end
        runs.append((tier, start))
    return runs


class PeerRuns:
    """Runs of one prompt's pages in any store. Each is searched for once, for the workers of all nodes."""

    def __init__(self, stores: Sequence[StorePrefixes], identities: Sequence[int], stop: int) -> None:
        self._stores = stores
        self._identities = identities
        self._stop = stop
        self._ends: dict[int, int] = {}

    def end(self, start: int) -> int:
        """Returns the index behind the longest run from `start` on; `start` if no store has this page."""
        if (end := self._ends.get(start)) is None:
            first = self._identities[start]
            end = self._ends[start] = max(
                (_end(s.holds, self._identities, start, self._stop) for s in self._stores if s.holds(first)),
                default=start,
            )
        return end


def _end(is_known: Callable[[int], bool], identities: Sequence[int], start: int, stop: int) -> int:
    # The first page is known to be there.
    return bisect_left(range(stop), True, start + 1, key=lambda i: not is_known(identities[i]))
