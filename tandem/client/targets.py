"""Which of a cluster's routers a client's next call goes to."""

import random
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

# A router at which a call has just failed is passed over for so long, where there are others.
AVOID_S = 1.0


class RouterTargets:
    """In turn, beginning anywhere: clients that start together do not all begin with the same one.

    Attributes:
        address: the one that the client was given.
        is_known: whether the cluster has ever said which routers there are.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: address: the one that the client was given, at which some router answers."""
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
        """Whether the cluster is to be asked which routers there are: at first, and when calls have failed at all that
        are known, for another cluster may have been started there."""
        now = self._clock()
        if now < self._ask_after:
            return False
        return not self.is_known or all(now < self._avoid_until.get(address, now) for address in self._addresses)

    def mark_unanswered(self) -> None:
        """The cluster was asked which routers there are, and has not answered."""
        self._ask_after = self._clock() + AVOID_S

    def set_routers(self, addresses: Sequence[str]) -> list[str]:
        """The cluster has said which routers there are.

        Args:
            addresses: their own; where that is one host for all, it may be 0.0.0.0.

        Returns:
            Where they are to be reached from here. Calls go to those that `mark_reached` names.
        """
        host = self.address.rpartition(":")[0]
        if len({address.rpartition(":")[0] for address in addresses}) > 1:
            own = list(addresses)
        else:
            # Some router answers at the address that the client was given, so they all are on that host.
            own = [f"{host}:{address.rpartition(':')[2]}" for address in addresses]
        self._addresses = own if len(own) > 1 and host else [self.address]
        self._reached.intersection_update(self._addresses)
        self.is_known = True
        return list(self._addresses)

    def mark_reached(self, address: str) -> None:
        """There is a connection to this router. One that cannot be reached from here, as behind a gateway that lets
        only the shared port through, is never called."""
        self._reached.add(address)

    def next(self, session_id: str = "") -> str:
        """Where to send the next call.

        Args:
            session_id: the conversation that the call belongs to; "" if to none. All clients send a conversation's
                calls to the same router, as far as it is there: that one knows which workers have cached what was said.
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
            # Rendezvous hashing: a router that goes or comes changes the place of its own conversations alone.
            return max(addresses, key=lambda address: blake2b(f"{session_id} {address}".encode()).digest())
        self._turn += 1
        return addresses[self._turn % len(addresses)]

    def avoid(self, address: str) -> None:
        """A call has failed there."""
        self._avoid_until[address] = self._clock() + AVOID_S
