"""A worker in the router's registry that records its messages."""

from collections.abc import Sequence
from typing import Any

from tandem.messages import PROTOCOL_VERSION, Hello, LinkState, PageFormat, WorkerMessage
from tandem.router.router import Router

PAGE_FORMAT = PageFormat("fake", 32, "fake")


def hello(
    worker_id: str,
    role: str,
    *,
    num_pages: int = 100,
    page_format: PageFormat = PAGE_FORMAT,
    life: str = "life",
    has_links: bool = False,
    max_request_pages: int = 0,
    num_restarts: int = 0,
    host: str = "",
    rack: str = "",
    start_s: float = 0.0,
    address: str = "nowhere:1",
) -> Hello:
    return Hello(
        PROTOCOL_VERSION,
        worker_id,
        f"{worker_id}-{life}",
        role,
        "cpu",
        address,
        1,
        page_format,
        num_pages,
        page_size=4,
        metrics_address="nowhere:2",
        has_links=has_links,
        max_request_pages=max_request_pages,
        num_restarts=num_restarts,
        host=host,
        rack=rack,
        start_s=start_s,
    )


class ScriptedWorker:
    def __init__(self, router: Router, worker_id: str, role: str, **kwargs: Any) -> None:
        self.router = router
        self.sent: list[Any] = []
        self.disconnected = ""
        self.worker = router.connect_worker(hello(worker_id, role, **kwargs), self._send, self._disconnect)

    def _send(self, messages: Sequence[Any]) -> None:
        self.sent.extend(messages)

    def _disconnect(self, reason: str) -> None:
        self.disconnected = reason

    def say(self, message: WorkerMessage) -> None:
        self.router.receive(self.worker, message)

    def link_to(self, *decode_worker_ids: str) -> None:
        for worker_id in decode_worker_ids:
            self.link_to_life(worker_id, f"{worker_id}-life")

    def link_to_life(self, decode_worker_id: str, incarnation: str) -> None:
        self.say(LinkState(decode_worker_id, incarnation, up=True))

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.sent if isinstance(m, kind)]
