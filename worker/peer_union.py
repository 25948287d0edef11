"""Which decode workers a prefill worker keeps links to, where several routers name them."""

from collections.abc import Callable, Sequence

from tandem.messages import Peer

# A peer that no router names any more keeps its link for so long: a router that is started again names nobody at first.
KEEP_S = 5.0


class PeerUnion:
    """The union of what all routers name. One that falls silent or is new removes nobody that others name, and nobody
    at all within KEEP_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # What each router, by its address, has last named, as long as there is a stream to it.
        self._named: dict[str, tuple[Peer, ...]] = {}
        # When somebody last named them; only those are here that nobody names now.
        self._unnamed_since: dict[Peer, float] = {}

    def set_named(self, router: str, peers: Sequence[Peer]) -> None:
        """A router has said whom to keep links to."""
        before = self._all_named()
        self._named[router] = tuple(peers)
        self._note_unnamed(before)

    def forget_router(self, router: str) -> None:
        """The stream to a router has ended."""
        before = self._all_named()
        self._named.pop(router, None)
        self._note_unnamed(before)

    def peers(self) -> tuple[Peer, ...]:
        """Whom to keep links to now. Of a worker that has been started again the earlier life counts only while a
        router names it."""
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
