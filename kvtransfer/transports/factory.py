"""Which transports a worker can use, and how to open them."""

from collections.abc import Sequence

from kvtransfer.transports import shared_memory, tcp
from kvtransfer.transports.base import ReceiverTransport, SenderTransport
from kvtransfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from kvtransfer.transports.tcp import TcpReceiver, TcpSender
from tandem.engine.kvcache.pool import KvPool
from tandem.messages import LinkWelcome

# Best first. A configuration may allow fewer.
CPU_TRANSPORTS = (shared_memory.NAME, tcp.NAME)


class TransportFactory:
    def __init__(self, pool: KvPool, host: str, names: Sequence[str] = CPU_TRANSPORTS) -> None:
        """
        Args:
            host: the address to receive at.
            names: the transports to use, best first.
        """
        self._pool = pool
        self._host = host
        self.names = tuple(names)

    def choose(self, offered: Sequence[str]) -> str | None:
        """The sender's best transport that this worker has too, if there is one."""
        return next((name for name in offered if name in self.names), None)

    def open_sender(self, welcome: LinkWelcome) -> SenderTransport:
        """Raises ValueError if the receiver cannot be reached this way."""
        if welcome.transport == shared_memory.NAME:
            return SharedMemorySender(self._pool, welcome.endpoint)
        if welcome.transport == tcp.NAME:
            return TcpSender(self._pool, welcome.endpoint)
        raise ValueError(f"the receiver chose an unknown transport {welcome.transport!r}")

    def open_receiver(self, name: str) -> ReceiverTransport:
        """`name` is one of `names`."""
        if name == shared_memory.NAME:
            return SharedMemoryReceiver(self._pool)
        assert name == tcp.NAME
        return TcpReceiver(self._pool, self._host)
