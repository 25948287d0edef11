"""The peers that routers name: decode workers to a prefill worker, page stores to each other."""

from collections.abc import Callable, Sequence

from tandem.messages import Peer

# Time for which an unnamed peer keeps its link, in seconds: a restarted router names none at first.
KEEP_S = 5.0


class PeerUnion:
    """The union of the peers named by all routers. A silent or new router removes no peer of another, and none within
    KEEP_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Peers of each connected router, by its address.
        self._named: dict[str, tuple[Peer, ...]] = {}
        self._unnamed_since: dict[Peer, float] = {}

    def set_named(self, router: str, peers: Sequence[Peer]) -> None:
        before = self._all_named()
        self._named[router] = tuple(peers)
        self._note_unnamed(before)

    def forget_router(self, router: str) -> None:
        before = self._all_named()
        self._named.pop(router, None)
        self._note_unnamed(before)

    def peers(self) -> tuple[Peer, ...]:
        """Returns the peers to know. An old incarnation of a peer counts only while a router names it."""
        named = self._all_named()
        lives = {peer.worker_id for peer in named}
        now = self._clock()
        kept = [
            peer for peer, since in self._unnamed_since.items() if now - since < KEEP_S and peer.worker_id not in lives
        ]
        return (*named, *kept)

    def _all_named(self) -> dict[Peer, None]:
        return dict.fromkeys(peer for peers in self._named.values() for peer in peers)

    def _note_unnamed(self, before: dict[Peer, None]) -> None:
        now, named = self._clock(), self._all_named()
        for peer in before:
            if peer not in named:
                self._unnamed_since[peer] = now
        self._unnamed_since = {
            peer: since for peer, since in self._unnamed_since.items() if peer not in named and now - since < KEEP_S
        }
