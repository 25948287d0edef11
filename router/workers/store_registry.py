"""The connected page stores, by the hosts whose workers they serve."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from tandem.messages import (
    CachedPrefixes,
    CacheWasReset,
    Peer,
    Peers,
    RepeatPrefixes,
    ResetCache,
    RouterMessage,
    StoreBeat,
    StoreJoin,
    StoreReport,
)
from tandem.router.workers.store_prefixes import StorePrefixes

logger = logging.getLogger(__name__)

# Identities of all stores together: 11 bytes each, about 180 MB.
MAX_IDENTITIES = 2**24
# Interval between repeats of a failed reset, and time after which it is repeated only to a store that connects.
RESET_RETRY_S, RESET_LIMIT_S = 2.0, 20.0


@dataclass(eq=False, slots=True)
class Store:
    """One life of a store, which is one stream of reports.

    Attributes:
        disconnect: ends the stream, with a reason.
        beat: its last one.
        peers: other stores that it was told last.
        reset_failure: why the last reset does not last; "": it does, or the store has not answered.
        reset_again_at: time to repeat the reset.
    """

    join: StoreJoin
    send: Callable[[Sequence[RouterMessage]], None]
    disconnect: Callable[[str], None]
    last_heard: float
    prefixes: StorePrefixes
    beat: StoreBeat = field(default_factory=StoreBeat)
    peers: tuple[Peer, ...] = ()
    reset_failure: str = ""
    reset_again_at: float = math.inf


class NodeStore:
    """The place of a host's store. Workers of the host keep it while stores come and go.

    Attributes:
        prefixes: of the host's store; None: none is connected.
        everywhere: of all hosts' stores.
    """

    __slots__ = ("__weakref__", "everywhere", "prefixes")

    def __init__(self) -> None:
        self.prefixes: StorePrefixes | None = None
        self.everywhere: Sequence[StorePrefixes] = ()


class StoreRegistry:
    """
    Attributes:
        num_resets: number of the last reset; 0: none.
        reset_until: end of its repeats, and of the wait for it.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        silence_timeout_s: float,
        max_identities: int = MAX_IDENTITIES,
        planned: Sequence[str] = (),
    ) -> None:
        """Args: planned: names of the cluster's stores: a reset lasts only if they have carried it out."""
        self._clock = clock
        self._silence_timeout_s = silence_timeout_s
        self._max_identities = max_identities
        self._is_full = False
        self._stores: dict[str, Store] = {}
        self.num_resets = 0
        self.reset_until = -math.inf
        # Number of the last reset that each store has carried out for good, by name; 0: none.
        self._resets_done = dict.fromkeys(planned, 0)
        self._nodes: WeakValueDictionary[str, NodeStore] = WeakValueDictionary()

    def __iter__(self) -> Iterator[Store]:
        return iter(list(self._stores.values()))

    def node(self, host: str) -> NodeStore:
        if (node := self._nodes.get(host)) is None:
            node = self._nodes[host] = NodeStore()
            self._place_all()
        return node

    def connect(
        self,
        join: StoreJoin,
        send: Callable[[Sequence[RouterMessage]], None],
        disconnect: Callable[[str], None],
    ) -> Store:
        """Registers a store, and ends an older stream of it."""
        if (old := self._stores.get(join.store_id)) is not None:
            self.lose(old, "it has connected again")
        store = Store(join, send, disconnect, self._clock(), StorePrefixes(self._room))
        self._stores[join.store_id] = store
        self._resets_done.setdefault(join.store_id, 0)
        self._place_all()
        logger.info("page store %s joined", join.store_id)
        return store

    def receive(self, store: Store, message: StoreReport) -> None:
        """Raises ValueError for a message that is out of place."""
        if self._stores.get(store.join.store_id) is not store:
            return
        store.last_heard = self._clock()
        match message:
            case CachedPrefixes():
                if not store.prefixes.receive(message):
                    store.send([RepeatPrefixes()])
            case StoreBeat():
                store.beat = message
            case CacheWasReset():
                self._take_reset(store, message)
            case _:
                raise ValueError(f"unexpected {type(message).__name__} from a page store")

    def reset(self) -> None:
        """Has all stores purge their pages; a store that is not connected now does when it connects."""
        self.num_resets += 1
        self.reset_until = self._clock() + RESET_LIMIT_S
        for store in self:
            self.repeat_reset(store)

    def repeat_reset(self, store: Store) -> None:
        """Sends the last reset, unless the store has carried it out."""
        store.reset_again_at = math.inf
        if self._resets_done[store.join.store_id] < self.num_resets:
            store.send([ResetCache(self.num_resets)])

    def repeat_failed_resets(self) -> None:
        now = self._clock()
        for store in self:
            if store.reset_again_at <= now < self.reset_until:
                self.repeat_reset(store)

    def unreset(self, number: int) -> dict[str, str]:
        """Returns the stores that may still find pages of before a reset, and why, by name.

        Args:
            number: of the reset.
        """
        reasons = {}
        for name, done in self._resets_done.items():
            if done < number:
                store = self._stores.get(name)
                reasons[name] = store.reset_failure or "no answer" if store is not None else "not connected"
        return reasons

    def _take_reset(self, store: Store, answer: CacheWasReset) -> None:
        name = store.join.store_id
        if not answer.failure:
            # Purges that waited for the opening of the folder may be answered after later ones.
            self._resets_done[name] = max(self._resets_done[name], answer.number)
            store.reset_failure = ""
        elif answer.number == self.num_resets:
            if answer.failure != store.reset_failure:
                logger.warning("page store %s may find pages of before the reset again: %s", name, answer.failure)
            store.reset_failure = answer.failure
            store.reset_again_at = self._clock() + RESET_RETRY_S

    def lose(self, store: Store, reason: str) -> None:
        """Forgets the store's pages at once."""
        if self._stores.get(store.join.store_id) is not store:
            return
        logger.info("page store %s lost: %s", store.join.store_id, reason)
        del self._stores[store.join.store_id]
        self._place_all()
        self.name_peers()
        store.disconnect(reason)

    def lose_silent(self) -> None:
        for store in self:
            if self._clock() - store.last_heard > self._silence_timeout_s:
                self.lose(store, f"silent for {self._silence_timeout_s:g} s")

    def excuse_silence(self, seconds: float) -> None:
        """Excludes `seconds` in which the router could not listen."""
        for store in self._stores.values():
            store.last_heard += seconds

    def name_peers(self) -> None:
        """Tells each store which others serve pages."""
        peers = {
            store.join.store_id: Peer(store.join.store_id, store.join.incarnation, store.join.address)
            for store in self
            if store.join.address
        }
        for name, store in self._stores.items():
            others = tuple(peer for peer in peers.values() if peer.worker_id != name)
            if others != store.peers:
                store.peers = others
                store.send([Peers(others)])

    def _place_all(self) -> None:
        # Of two stores that claim one host, the last counts.
        by_host = {store.join.host: store.prefixes for store in self._stores.values()}
        everywhere = tuple(by_host.values())
        for host, node in self._nodes.items():
            node.prefixes = by_host.get(host)
            node.everywhere = everywhere

    def _room(self) -> int:
        room = self._max_identities - sum(len(store.prefixes) for store in self._stores.values())
        if room <= 0 and not self._is_full:
            logger.warning(
                "the page stores hold more than the %d pages that a router keeps track of: it ignores further ones",
                self._max_identities,
            )
        self._is_full = room <= 0
        return max(0, room)
