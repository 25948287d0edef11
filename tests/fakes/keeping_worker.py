"""A scripted worker of several routers with a real record keeper."""

from collections.abc import Sequence
from typing import Any

from tandem.messages import Admit, LinkState, Prefill, Recall, WorkerMessage
from tandem.request_ids import router_of
from tandem.router.router import Router
from tandem.router.workers.worker import Worker
from tandem.worker.records import RecordKeeper
from tests.fakes.scripted_worker import hello


class KeepingWorker:
    """
    Attributes:
        sent: messages from routers, in order, except those answered automatically.
        is_stopped: whether it neither reads nor writes.
    """

    def __init__(self, worker_id: str, role: str, max_record_bytes: int = 2**20, *, num_pages: int = 100) -> None:
        self.records = RecordKeeper(max_record_bytes)
        self.sent: list[Any] = []
        self.is_stopped = False
        self._hello = hello(worker_id, role, num_pages=num_pages)
        self._streams: dict[str, tuple[Router, Worker]] = {}

    def join(self, router: Router) -> None:
        worker: Worker | None = None

        def receive(messages: Sequence[Any]) -> None:
            for message in messages:
                if self.is_stopped:
                    return
                if isinstance(message, Recall):
                    assert worker is not None
                    router.receive(worker, self.records.recall(message))
                    continue
                if isinstance(message, Admit | Prefill):
                    self.records.begin(message)
                self.sent.append(message)

        worker = router.connect_worker(self._hello, receive, lambda _: None)
        self._streams[router.incarnation] = router, worker

    def link_to(self, decode_worker_id: str) -> None:
        for router, worker in self._streams.values():
            router.receive(worker, LinkState(decode_worker_id, f"{decode_worker_id}-life", up=True))

    def leave(self, router: Router) -> None:
        """End the router's stream without a message."""
        del self._streams[router.incarnation]

    def say(self, message: WorkerMessage) -> None:
        self.records.note([message])
        events: Sequence[Any] = getattr(message, "events", (message,))
        if stream := self._streams.get(router_of(events[0].request_id)):
            stream[0].receive(stream[1], message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]
