"""Chooses the router for a client's next call."""

import random
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

# Time to avoid a router after a failed call.
AVOID_S = 1.0


class RouterTargets:
    """Routers in turn, from a random start, so that clients that start together spread out.

    Attributes:
        address: given to the client; some router answers there.
        is_known: the cluster has reported its routers.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._clock = clock
        self._addresses: list[str] = [address]
        self._reached: set[str] = set()
        self._ask_after = 0.0
        self._avoid_until: dict[str, float] = {}
        self._turn = random.randrange(2**16)
        self.is_known = False

    @property
    def must_ask(self) -> bool:
        """True at first, and after calls failed at all known routers: another cluster may run there."""
        now = self._clock()
        if now < self._ask_after:
            return False
        return not self.is_known or all(now < self._avoid_until.get(address, now) for address in self._addresses)

    def mark_unanswered(self) -> None:
        self._ask_after = self._clock() + AVOID_S

    def set_routers(self, addresses: Sequence[str]) -> list[str]:
        """Set the reported routers. On a single host, their host part may be 0.0.0.0.

        Returns:
            Addresses to connect to. Only those confirmed by `mark_reached` get calls.
        """
        host = self.address.rpartition(":")[0]
        if len({address.rpartition(":")[0] for address in addresses}) > 1:
            own = list(addresses)
        else:
            # All routers share the host of the given address.
            own = [f"{host}:{address.rpartition(':')[2]}" for address in addresses]
        self._addresses = own if len(own) > 1 and host else [self.address]
        self._reached.intersection_update(self._addresses)
        self.is_known = True
        return list(self._addresses)

    def mark_reached(self, address: str) -> None:
        """Allow calls to a router. Behind a gateway for the shared port, routers are never reached."""
        self._reached.add(address)

    def next(self, session_id: str = "") -> str:
        """Return the address for the next call.

        Args:
            session_id: all clients send a session to the same available router, which knows the workers that cached it.
        """
        now = self._clock()
        addresses = [
            address
            for address in self._addresses
            if address in self._reached and now >= self._avoid_until.get(address, now)
        ]
        if not addresses:
            return self.address
        if session_id:
            # Rendezvous hashing: a router that leaves or joins moves only its own conversations.
            return max(addresses, key=lambda address: blake2b(f"{session_id} {address}".encode()).digest())
        self._turn += 1
        return addresses[self._turn % len(addresses)]

    def avoid(self, address: str) -> None:
        self._avoid_until[address] = self._clock() + AVOID_S
