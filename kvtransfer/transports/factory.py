"""Which transports a worker can use, and how to open them."""

from collections.abc import Sequence

from engine.kvcache.pool import KvPool
from kvtransfer.transports.base import ReceiverTransport, SenderTransport
from kvtransfer.transports.table import TRANSPORTS
from tandem.messages import LinkWelcome


class TransportFactory:
    def __init__(self, pool: KvPool, host: str, names: Sequence[str]) -> None:
        """
        Args:
            host: the address to receive at.
            names: the transports to use, best first.
        """
        self._transports = {name: TRANSPORTS.load(name)(pool, host) for name in names}
        self.names = tuple(names)

    def choose(self, offered: Sequence[str]) -> str | None:
        """The sender's best transport that this worker has too, if there is one."""
        return next((name for name in offered if name in self.names), None)

    def open_sender(self, welcome: LinkWelcome) -> SenderTransport:
        """Raises ValueError if the receiver cannot be reached this way."""
        if welcome.transport not in self._transports:
            raise ValueError(f"the receiver chose an unknown transport {welcome.transport!r}")
        return self._transports[welcome.transport].open_sender(welcome.endpoint)

    def open_receiver(self, name: str) -> ReceiverTransport:
        """`name` is one of `names`."""
        return self._transports[name].open_receiver()
