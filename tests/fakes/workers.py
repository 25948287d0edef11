"""A prefill and a decode worker with fake engines, without processes or sockets.

The test delivers the messages.
"""

import itertools
from collections.abc import Callable
from typing import Any

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.embedding import EmbeddingParams
from tandem.engine.adapters.base import Adapters
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.events import (
    FromReceiver,
    FromSender,
    ReceiverLinkClosed,
    ReceiverLinkOpened,
    SenderLinkClosed,
    SenderLinkOpened,
)
from tandem.kvtransfer.sender_link import MAX_PAGES_IN_FLIGHT
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.kvtransfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tandem.messages import (
    PROTOCOL_VERSION,
    Abort,
    Admit,
    Embedded,
    LinkHello,
    PageFormat,
    Prefill,
    TokenEvent,
    Tokens,
)
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.handover import LinkHandover
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.recording import Recorder
from tandem.sampling_params import SamplingParams
from tandem.worker.base import Outbox
from tandem.worker.events import FromRouter
from tandem.worker.page_tier import PageTier
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine


class ListOutbox(Outbox):
    """Collect a scheduler's messages.

    Attributes:
        router: messages to the router, in order.
        link: (epoch, message) to the linked worker, in order.
        store: (epoch, message) to the page store, in order.
    """

    def __init__(self) -> None:
        self.router: list[Any] = []
        self.link: list[tuple[str, Any]] = []
        self.store: list[tuple[str, Any]] = []
        self.closed: dict[str, str] = {}

    def to_router(self, message: Any) -> None:
        self.router.append(message)

    def to_link(self, epoch: str, message: Any) -> None:
        self.link.append((epoch, message))

    def close_link(self, epoch: str, reason: str) -> None:
        self.closed[epoch] = reason

    def to_store(self, epoch: str, message: Any) -> None:
        self.store.append((epoch, message))

    def flush(self) -> bool:
        return False

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.router if isinstance(m, kind)]


class PrefillSide:
    def __init__(
        self,
        clock: FakeClock,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        config: PrefillConfig | None = None,
        max_pages_in_flight: int = MAX_PAGES_IN_FLIGHT,
        asynchronous: bool = False,
        tier: PageTier | None = None,
        adapters: Adapters | None = None,
        engine: Any = None,
    ) -> None:
        """Args: asynchronous: as in FakeEngine. engine: None for a FakeEngine."""
        self.engine = engine or FakeEngine(num_pages, page_size, asynchronous=asynchronous)
        self.engine.adapters = adapters
        self.cache = CacheManager(num_pages, page_size)
        self.outbox = ListOutbox()
        self.recorder = Recorder()
        self.handover = LinkHandover(
            self.engine.pool.layout, self.engine.launches, self.outbox, clock, max_pages_in_flight, self.recorder
        )
        config = config or PrefillConfig(min_shared_tokens=page_size)
        self.scheduler = PrefillScheduler(
            self.engine, self.cache, self.handover, self.outbox, config, clock, self.recorder, tier=tier
        )


class DecodeSide:
    def __init__(
        self,
        clock: FakeClock,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        config: DecodeConfig | None = None,
        asynchronous: bool = False,
        step_s: float = 0.0,
        tier: PageTier | None = None,
        adapters: Adapters | None = None,
        engine: Any = None,
    ) -> None:
        """Args: asynchronous, step_s: as in FakeEngine. engine: None for a FakeEngine."""
        self.engine = engine or FakeEngine(num_pages, page_size, asynchronous=asynchronous, step_s=step_s)
        self.engine.adapters = adapters
        self.cache = CacheManager(num_pages, page_size)
        self.outbox = ListOutbox()
        self.recorder = Recorder()
        self.scheduler = DecodeScheduler(
            self.engine, self.cache, self.outbox, config or DecodeConfig(), clock, self.recorder, tier=tier
        )


class WorkerPair:
    """A linked prefill and decode worker; the test acts as the router."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        prefill: dict[str, Any] | None = None,
        open_sender: Callable[[CpuKvPool, bytes], SenderTransport] = SharedMemorySender,
        open_receiver: Callable[[CpuKvPool], ReceiverTransport] = SharedMemoryReceiver,
        **decode: Any,
    ) -> None:
        """Args: open_sender, open_receiver: open the transport's ends, each over its worker's pool."""
        self.clock = FakeClock()
        self._open_sender = open_sender
        self._open_receiver = open_receiver
        self.p = PrefillSide(self.clock, page_size=page_size, **(prefill or {}))
        self.d = DecodeSide(self.clock, page_size=page_size, **decode)
        self._epochs = itertools.count()
        self.epoch = ""
        self.sender_gone = False
        self.open_link()

    def open_link(self) -> None:
        self.epoch = f"epoch-{next(self._epochs)}"
        page_format = PageFormat("fake", 1, "fake")
        hello = LinkHello(PROTOCOL_VERSION, "p", "p-life", "d-life", page_format, ("shared_memory",), ())
        receiver = self._open_receiver(self.d.engine.pool)
        self.d.scheduler.receive(ReceiverLinkOpened(self.epoch, hello, receiver, lambda: self.sender_gone))
        sender = self._open_sender(self.p.engine.pool, receiver.endpoint())
        self.p.scheduler.receive(SenderLinkOpened("d", "d-life", self.epoch, "shared_memory", sender))

    def cut_link(self) -> None:
        """End the stream at both ends and lose the messages under way."""
        self.p.outbox.link.clear()
        self.d.outbox.link.clear()
        self.p.scheduler.receive(SenderLinkClosed(self.epoch, "cut", lambda: None))
        self.d.scheduler.receive(ReceiverLinkClosed(self.epoch))

    def submit(
        self,
        request_id: str,
        prompt_ids: list[int],
        *,
        max_tokens: int = 5,
        output_ids: tuple[int, ...] = (),
        attempt: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Submit a request; `kwargs` are fields of both Admit and Prefill: arrival_ns, priority, cache_namespace."""
        sampling = SamplingParams(
            max_tokens,
            seed=seed,
            stop_token_ids=stop_token_ids,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )
        self.submit_sampled(request_id, prompt_ids, sampling, output_ids=output_ids, attempt=attempt, **kwargs)

    def submit_sampled(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        output_ids: tuple[int, ...] = (),
        attempt: int = 0,
        **kwargs: Any,
    ) -> None:
        prompt = tuple(prompt_ids)
        admit = Admit(request_id, attempt, prompt, output_ids, sampling, 60.0, **kwargs)
        self.d.scheduler.receive(FromRouter(admit))
        prefill = Prefill(request_id, attempt, prompt, output_ids, sampling, "d", **kwargs)
        self.p.scheduler.receive(FromRouter(prefill))

    def embed(
        self, request_id: str, prompt_ids: list[int], params: EmbeddingParams | None = None, **kwargs: Any
    ) -> None:
        """Submit a prompt to embed; `kwargs` are further fields of Prefill."""
        embedding = params or EmbeddingParams()
        prefill = Prefill(request_id, 0, tuple(prompt_ids), (), SamplingParams(1), "", embedding=embedding, **kwargs)
        self.p.scheduler.receive(FromRouter(prefill))

    def embeddings(self) -> dict[str, bytes]:
        """Return the reported embeddings by request."""
        return {message.request_id: message.values for message in self.p.outbox.of(Embedded)}

    def abort(self, request_id: str, attempt: int = 0) -> None:
        for side in (self.p, self.d):
            side.scheduler.receive(FromRouter(Abort(request_id, attempt)))

    def deliver(self) -> bool:
        """Deliver all link messages under way, both ways; return whether there were any."""
        to_d, self.p.outbox.link = self.p.outbox.link, []
        to_p, self.d.outbox.link = self.d.outbox.link, []
        for epoch, message in to_d:
            self.d.scheduler.receive(FromSender(epoch, message))
        for epoch, message in to_p:
            self.p.scheduler.receive(FromReceiver(epoch, message))
        return bool(to_d or to_p)

    def turn(self) -> bool:
        """Step each worker, then deliver the messages; return whether anything happened.

        If neither worker has anything to do, the prefill device runs its oldest forward pass.
        """
        worked = [self.p.scheduler.step(), self.d.scheduler.step(), self.deliver()]
        if not any(worked) and self.p.engine.num_launched:
            self.p.engine.run_next()
            return True
        return any(worked)

    def run(self, max_turns: int = 1000) -> None:
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError("the workers do not come to rest")

    def tokens(self, request_id: str, attempt: int = 0) -> dict[int, int]:
        """Return the decode worker's reported tokens by index; repeated reports must agree."""
        tokens: dict[int, int] = {}
        events: list[TokenEvent] = [e for m in self.d.outbox.of(Tokens) for e in m.events]
        for event in events:
            if (event.request_id, event.attempt) == (request_id, attempt):
                for index, token_id in enumerate(event.token_ids, event.index):
                    assert tokens.setdefault(index, token_id) == token_id
        return tokens

    def output(self, request_id: str, attempt: int = 0) -> list[int]:
        tokens = self.tokens(request_id, attempt)
        assert list(tokens) == sorted(tokens), "tokens out of order"
        return list(tokens.values())

    def check(self) -> None:
        """Check the page accounting of both workers."""
        assert self.p.scheduler.check_integrity() == ""
        assert self.d.scheduler.check_integrity() == ""

    def check_idle(self) -> None:
        """Check that every page is free or cached."""
        self.check()
        for side in (self.p, self.d):
            stats = side.scheduler.stats()
            assert (stats.num_locked_pages, stats.num_leased_pages, stats.num_running, stats.num_queued) == (0, 0, 0, 0)
