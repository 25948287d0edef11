"""Control streams between simulated workers and routers."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.messages import ClockProbe, Hello, Peer, Peers, Progress
from tandem.router.workers.worker import Worker
from tandem.worker.control_client import ControlClient

if TYPE_CHECKING:
    from tests.fakes.simulation.router import SimRouter
    from tests.fakes.simulation.worker import SimWorker

END = object()


class SimStream:
    """A control stream, from the worker's Hello until both ends have noticed its end.

    It replaces the writer in the worker's ControlClient. Each end reads at the simulation's command.

    Attributes:
        registered: the router's worker, once it has read Hello.
        named: peers named by the router, as far as the worker has read.
    """

    def __init__(self, worker: "SimWorker", client: ControlClient, router: "SimRouter") -> None:
        self.worker, self.router = worker, router
        self._client = client
        self.to_router: deque[Any] = deque()
        self.to_worker: deque[Any] = deque()
        self.registered: Worker | None = None
        self.named: tuple[Peer, ...] = ()
        self.is_open_at_worker = self.is_open_at_router = True
        # As in BatchWriter; lost messages count as taken.
        self.num_sent = 0
        self.opened_at = worker.simulation.clock.now
        worker.streams[client.address] = self
        client._begin_stream(self)  # type: ignore[arg-type]

    @property
    def is_welcomed(self) -> bool:
        return self.is_open_at_worker and bool(self._client.router)

    @property
    def is_over(self) -> bool:
        return not (self.is_open_at_worker or self.is_open_at_router)

    @property
    def num_taken(self) -> int:
        return self.num_sent - len(self.to_router)

    def send(self, messages: Sequence[Any]) -> None:
        """Send the worker's messages, without Progress: it serves only the ledger and would cost turns."""
        if self.is_open_at_worker and self.is_open_at_router:
            told = [message for message in messages if not isinstance(message, Progress)]
            self.num_sent += len(told)
            self.to_router.extend(told)

    def _say(self, messages: Sequence[Any]) -> None:
        """Send the router's messages, without ClockProbe: simulated processes share a clock."""
        if self.is_open_at_worker and self.is_open_at_router:
            self.to_worker.extend(message for message in messages if not isinstance(message, ClockProbe))

    def end_at_router(self, _: str = "") -> None:
        """Close the router's end; its written messages still arrive."""
        if self.is_open_at_router:
            self.is_open_at_router = False
            self.to_router.clear()
            self._end(self.to_worker, self.is_open_at_worker, is_lost=False)

    def end_at_worker(self) -> None:
        """Close the worker's end; its written messages still arrive."""
        if self.is_open_at_worker:
            self.is_open_at_worker = False
            self.to_worker.clear()
            del self.worker.streams[self._client.address]
            self._client._end_stream()
            self._end(self.to_router, self.is_open_at_router, is_lost=False)

    def worker_dies(self, is_lost: bool) -> None:
        """Args: is_lost: whether its written messages are lost."""
        self.is_open_at_worker = False
        self.to_worker.clear()
        self._end(self.to_router, self.is_open_at_router, is_lost)

    def router_dies(self, is_lost: bool) -> None:
        self.is_open_at_router = False
        self.to_router.clear()
        self._end(self.to_worker, self.is_open_at_worker, is_lost)

    def cut(self) -> None:
        self._end(self.to_router, self.is_open_at_router, is_lost=True)
        self._end(self.to_worker, self.is_open_at_worker, is_lost=True)

    def _end(self, queue: deque[Any], is_open: bool, is_lost: bool) -> None:
        if is_lost:
            queue.clear()
        if is_open and END not in queue:
            queue.append(END)

    def deliver_to_worker(self) -> None:
        if not self.to_worker or not self.worker.runs:
            return
        message = self.to_worker.popleft()
        self.worker.note_named()
        if message is END:
            self.end_at_worker()
            return
        if isinstance(message, Peers):
            self.named = message.peers
        self._client._receive([message])

    def deliver_to_router(self) -> None:
        if not self.to_router or not self.router.runs:
            return
        message = self.to_router.popleft()
        router = self.router.router
        if message is END:
            self.is_open_at_router = False
            if self.registered is not None:
                router.lose_worker(self.registered, "disconnected", "its stream ended")
        elif isinstance(message, Hello):
            self.registered = router.connect_worker(message, self._say, self.end_at_router)
        elif self.registered is not None and router.workers.get(self.worker.worker_id) is self.registered:
            router.receive(self.registered, message)
