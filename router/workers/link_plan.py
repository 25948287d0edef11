"""The pairs of workers that keep a link.

Links between all pairs of 1,000 workers would be a million. So beyond MAX_ALL, each worker picks NUM_PICKS workers of
the other side, and two workers keep a link if one picked the other: about MAX_ALL links a worker in a cluster of any
size. Picks depend on the workers' ids alone: all routers make the same, restarts change none, and a joining or leaving
worker changes few.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Set
from hashlib import shake_128

# Up to this number of senders or of receivers, all pairs keep a link.
MAX_ALL = 64
NUM_PICKS = 32
# Places of a worker on the ring: with more of them, workers are picked more evenly.
NUM_PLACES = 32


class LinkPlan:
    def __init__(self, roles: Mapping[str, str]) -> None:
        """Args: roles: of all workers by id."""
        # Workers with `--both` beside other roles have no links.
        are_alike = not {"prefill", "decode"} & set(roles.values())
        senders = sorted(name for name, role in roles.items() if are_alike or role == "prefill")
        receivers = senders if are_alike else sorted(name for name, role in roles.items() if role == "decode")
        self._names = roles.keys()
        self._is_limited = min(len(senders), len(receivers)) > MAX_ALL + are_alike
        self._receivers: dict[str, set[str]] = {name: set() for name in senders}
        self._senders: dict[str, set[str]] = {name: set() for name in receivers}
        if self._is_limited:
            for sender, picked in _picks(senders, receivers):
                self._add(sender, picked)
            for receiver, picked in _picks(receivers, senders):
                self._add(picked, receiver)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def receivers_of(self, sender: str) -> Set[str] | None:
        """None: all. The same for `senders_of`."""
        return self._receivers.get(sender, set()) if self._is_limited else None

    def senders_of(self, receiver: str) -> Set[str] | None:
        return self._senders.get(receiver, set()) if self._is_limited else None

    def _add(self, sender: str, receiver: str) -> None:
        if sender != receiver:
            self._receivers[sender].add(receiver)
            self._senders[receiver].add(sender)


def _picks(ones: Iterable[str], others: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yields each worker with each of its picks: the next of `others` on a ring, from NUM_PICKS points of its own."""
    ring = sorted((point, other) for other in others for point in _points("picked", other, NUM_PLACES))
    places = [point for point, _ in ring]
    for one in ones:
        for point in _points("picks", one, NUM_PICKS):
            yield one, ring[bisect_left(places, point) % len(ring)][1]


def _points(side: str, name: str, count: int) -> tuple[int, ...]:
    return struct.unpack(f"!{count}Q", shake_128(f"{side} {name}".encode()).digest(8 * count))
