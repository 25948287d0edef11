"""Which transports a worker can use, and how to open them."""

from collections.abc import Sequence

from engine.kvcache.pool import CpuKvPool, KvPool
from kvtransfer.transports.base import ReceiverTransport, SenderTransport
from kvtransfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from kvtransfer.transports.tcp import TcpReceiver, TcpSender
from tandem.config import TRANSPORTS, TRANSPORTS_OF
from tandem.messages import LinkWelcome


class TransportFactory:
    def __init__(self, pool: KvPool, host: str, names: Sequence[str] = TRANSPORTS) -> None:
        """
        Args:
            host: the address to receive at.
            names: the transports to use, best first; those that cannot move this pool's pages do not count.

        Raises:
            ValueError: none of them can.
        """
        self._pool = pool
        self._host = host
        kind = pool.kv.device.type
        self.names = tuple(name for name in names if name in TRANSPORTS_OF[kind])
        if not self.names:
            raise ValueError(f"transport {', '.join(names)} cannot move pages of a {kind} device")

    def choose(self, offered: Sequence[str]) -> str | None:
        """The sender's best transport that this worker has too, if there is one."""
        return next((name for name in offered if name in self.names), None)

    def open_sender(self, welcome: LinkWelcome) -> SenderTransport:
        """Raises ValueError if the receiver cannot be reached this way."""
        if welcome.transport not in self.names:
            raise ValueError(f"the receiver chose an unknown transport {welcome.transport!r}")
        if not isinstance(self._pool, CpuKvPool):
            # Imported here: a machine without CUDA has nothing to import.
            from kvtransfer.transports.nvlink import NvlinkSender

            return NvlinkSender(self._pool, welcome.endpoint)  # type: ignore[arg-type]
        if welcome.transport == "shared_memory":
            return SharedMemorySender(self._pool, welcome.endpoint)
        return TcpSender(self._pool, welcome.endpoint)

    def open_receiver(self, name: str) -> ReceiverTransport:
        """`name` is one of `names`."""
        assert name in self.names
        if not isinstance(self._pool, CpuKvPool):
            from kvtransfer.transports.nvlink import NvlinkReceiver

            return NvlinkReceiver(self._pool)  # type: ignore[arg-type]
        if name == "shared_memory":
            return SharedMemoryReceiver(self._pool)
        return TcpReceiver(self._pool, self._host)
