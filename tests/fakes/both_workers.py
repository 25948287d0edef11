"""Linked workers of role both, by default with fake engines, without processes or sockets.

The test delivers the messages.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.embedding import EmbeddingParams
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.events import (
    FromReceiver,
    FromSender,
    ReceiverLinkClosed,
    ReceiverLinkOpened,
    SenderLinkClosed,
    SenderLinkOpened,
)
from tandem.kvtransfer.transports.base import SenderTransport
from tandem.kvtransfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tandem.messages import PROTOCOL_VERSION, Admit, LinkHello, PageFormat, Prefill, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter
from tandem.worker.page_tier import PageTier
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.workers import ListOutbox

PAGE_SIZE = 4

OpenSender = Callable[[Any, bytes], SenderTransport]


class BothWorker:
    def __init__(
        self,
        worker_id: str,
        clock: FakeClock,
        num_pages: int,
        config: DecodeConfig,
        tier: PageTier | None = None,
        engine: Any = None,
    ) -> None:
        self.worker_id = worker_id
        self.engine = engine or FakeEngine(num_pages, PAGE_SIZE)
        self.cache = CacheManager(num_pages, PAGE_SIZE, max_request_pages=num_pages // 2)
        self.outbox = ListOutbox()
        prefill = PrefillConfig(chunk_size=64, min_shared_tokens=PAGE_SIZE, grant_timeout_s=1e9)
        self.scheduler = make_both_scheduler(
            worker_id, self.engine, self.cache, self.outbox, prefill, config, has_links=True, clock=clock, tier=tier
        )


class BothWorkers:
    """
    Attributes:
        links: sender and receiver, by epoch.
    """

    def __init__(
        self,
        num_pages: int,
        names: Sequence[str] = ("a", "b"),
        config: DecodeConfig | None = None,
        open_sender: OpenSender = SharedMemorySender,
        tiers: Mapping[str, PageTier] | None = None,
        engines: Mapping[str, Any] | None = None,
    ) -> None:
        """Args: engines: by worker, of `num_pages` pages of PAGE_SIZE tokens; None for FakeEngines."""
        self.clock = FakeClock()
        config = config or DecodeConfig()
        self.workers = {
            name: BothWorker(name, self.clock, num_pages, config, (tiers or {}).get(name), (engines or {}).get(name))
            for name in names
        }
        self.links: dict[str, tuple[BothWorker, BothWorker]] = {}
        self._open_sender = open_sender
        self._arrivals = itertools.count(1)
        for sender, receiver in itertools.permutations(names, 2):
            self.open_link(sender, receiver)

    def open_link(self, sender_id: str, receiver_id: str) -> str:
        sender, receiver = self.workers[sender_id], self.workers[receiver_id]
        epoch = f"{sender_id} to {receiver_id}"
        self.links[epoch] = sender, receiver
        hello = LinkHello(
            PROTOCOL_VERSION, sender_id, "life", "life", PageFormat("fake", 1, "fake"), ("shared_memory",), ()
        )
        end = SharedMemoryReceiver(receiver.engine.pool)
        receiver.scheduler.receive(ReceiverLinkOpened(epoch, hello, end, lambda: False))
        transport = self._open_sender(sender.engine.pool, end.endpoint())
        sender.scheduler.receive(SenderLinkOpened(receiver_id, "life", epoch, "shared_memory", transport))
        return epoch

    def cut_link(self, sender_id: str, receiver_id: str, when_quiet: Callable[[], None]) -> None:
        """End the stream at both ends and lose the messages under way."""
        epoch = f"{sender_id} to {receiver_id}"
        sender, receiver = self.links.pop(epoch)
        sender.scheduler.receive(SenderLinkClosed(epoch, "cut", when_quiet))
        receiver.scheduler.receive(ReceiverLinkClosed(epoch))

    def submit(
        self, request_id: str, prompt_ids: Sequence[int], prefill_at: str, decode_at: str, max_tokens: int = 3
    ) -> None:
        """Submit a request; later calls make younger requests."""
        prompt, sampling, arrival_ns = tuple(prompt_ids), SamplingParams(max_tokens), next(self._arrivals)
        admit = Admit(request_id, 0, prompt, (), sampling, 60.0, arrival_ns, prefill_worker_id=prefill_at)
        self.workers[decode_at].scheduler.receive(FromRouter(admit))
        prefill = Prefill(request_id, 0, prompt, (), sampling, decode_at, arrival_ns)
        self.workers[prefill_at].scheduler.receive(FromRouter(prefill))

    def embed(self, request_id: str, prompt_ids: Sequence[int], at: str) -> None:
        arrival_ns, params = next(self._arrivals), EmbeddingParams()
        prefill = Prefill(request_id, 0, tuple(prompt_ids), (), SamplingParams(1), "", arrival_ns, embedding=params)
        self.workers[at].scheduler.receive(FromRouter(prefill))

    def deliver(self) -> bool:
        """Deliver all link messages under way; return whether there were any."""
        under_way = []
        for worker in self.workers.values():
            under_way += [(worker, *said) for said in worker.outbox.link]
            worker.outbox.link = []
        for worker, epoch, message in under_way:
            if epoch in self.links:
                sender, receiver = self.links[epoch]
                if worker is sender:
                    receiver.scheduler.receive(FromSender(epoch, message))
                else:
                    sender.scheduler.receive(FromReceiver(epoch, message))
        return bool(under_way)

    def turn(self) -> bool:
        """Step each worker, then deliver the messages; return whether anything happened."""
        worked = [worker.scheduler.step() for worker in self.workers.values()]
        delivered = self.deliver()
        for worker in self.workers.values():
            assert worker.scheduler.check_integrity() == ""
        return delivered or any(worked)

    def run(self, max_turns: int = 1000) -> None:
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError("the workers do not come to rest")

    def output(self, worker_id: str, request_id: str) -> list[int]:
        events = [e for message in self.workers[worker_id].outbox.of(Tokens) for e in message.events]
        return [token for e in events if e.request_id == request_id for token in e.token_ids]

    def of(self, worker_id: str, kind: type) -> list[Any]:
        return self.workers[worker_id].outbox.of(kind)
