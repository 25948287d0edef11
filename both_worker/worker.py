"""Role `both`: prefill and decode in one worker, over one engine and one pool.

The launcher hands it one scheduler of each kind. Nothing is copied at the handover: the pages that prefill locked pass
to the decode scheduler.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc

from engine.engine import Engine
from engine.kvcache.cache_manager import CacheManager
from tandem.config import WorkerConfig
from tandem.lifecycle import now_ns
from tandem.messages import Hello, Peer, Prefill, Shipped, WorkerStats
from worker.base import (
    AdoptingScheduler,
    ForwardScheduler,
    Handover,
    HandoverResult,
    Outbox,
    PrefillJob,
    Scheduler,
)
from worker.events import Event
from worker.process import LinkConnections, WorkerRole


class LocalHandover(Handover):
    """From prefill to decode within one worker."""

    def __init__(self, decode: AdoptingScheduler) -> None:
        self._decode = decode
        self._results: list[HandoverResult] = []

    @property
    def continues_here(self) -> bool:
        return True

    @property
    def shipped(self) -> tuple[Shipped, ...]:
        return ()

    @property
    def is_copying(self) -> bool:
        return False

    def refusal(self, request: Prefill) -> str:
        return ""

    def start(self, job: PrefillJob) -> None:
        """There is room: the pages are here."""

    def advance(self, job: PrefillJob) -> None:
        if job.first_token is None:
            return
        admit = self._decode.take_admitted(*job.key)
        if admit is None:
            self._results.append(HandoverResult(job, "the request is not admitted here"))
            return
        assert job.handle is not None
        handle, job.handle = job.handle, None
        self._decode.adopt(
            admit,
            handle,
            first_token=job.first_token,
            logprobs=job.logprobs,
            finish_reason=job.finish_reason,
            num_pages_shipped=0,
            granted_ns=now_ns(),
        )
        self._results.append(HandoverResult(job))

    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        """Nothing was asked for."""

    def receive(self, event: Event) -> None:
        """No link, no events."""

    def poll(self) -> list[HandoverResult]:
        results, self._results = self._results, []
        return results


class CombinedScheduler(Scheduler):
    """Alternates a prefill and a decode scheduler that share one cache: one forward of each a turn. Prefills overlap
    while nothing is decoded."""

    def __init__(self, prefill: ForwardScheduler, decode: AdoptingScheduler) -> None:
        self._prefill = prefill
        self._decode = decode

    def receive(self, event: Event) -> None:
        self._prefill.receive(event)
        self._decode.receive(event)

    def step(self) -> bool:
        prefilled = self._prefill.step()
        if self._decode.num_running:
            if prefilled:
                # The decode step in flight ends before the prefill behind it: its tokens have waited for the launch of
                # that, and do not wait for its end.
                self._decode.settle()
            # The next decode step would run behind the prefill in flight anyway: what that prefill gives goes on with
            # this step, not with the one after.
            self._prefill.settle()
        decoded = self._decode.step()
        return prefilled or decoded

    def next_deadline(self) -> float | None:
        deadlines = (self._prefill.next_deadline(), self._decode.next_deadline())
        return min((d for d in deadlines if d is not None), default=None)

    def stats(self) -> WorkerStats:
        # One engine and one cache: their figures are the same in both. Prompts meet the cache at prefill alone.
        prefill, decode = self._prefill.stats(), self._decode.stats()
        return replace(
            decode,
            num_queued=prefill.num_queued + decode.num_queued,
            num_running=prefill.num_running + decode.num_running,
            prefix_cached_tokens=prefill.prefix_cached_tokens,
        )

    def check_integrity(self) -> str:
        return self._decode.check_integrity()


class NoLinks(LinkConnections):
    """A worker that ships nothing has no links."""

    def add_to(self, server: grpc.aio.Server) -> None: ...

    def set_peers(self, peers: Sequence[Peer]) -> None: ...

    def send(self, epoch: str, messages: Sequence[Any]) -> None: ...

    def close_link(self, epoch: str, reason: str) -> None: ...

    async def stop(self) -> None: ...


MakePrefill = Callable[[Engine, CacheManager, Handover, Outbox, WorkerConfig], ForwardScheduler]
MakeDecode = Callable[[Engine, CacheManager, Outbox, WorkerConfig], AdoptingScheduler]


class BothRole(WorkerRole):
    def __init__(self, make_prefill: MakePrefill, make_decode: MakeDecode) -> None:
        self._make_prefill = make_prefill
        self._make_decode = make_decode

    def build_scheduler(self, engine: Engine, cache: CacheManager, outbox: Outbox, config: WorkerConfig) -> Scheduler:
        decode = self._make_decode(engine, cache, outbox, config)
        prefill = self._make_prefill(engine, cache, LocalHandover(decode), outbox, config)
        return CombinedScheduler(prefill, decode)

    def build_links(
        self, engine: Engine, hello: Hello, config: WorkerConfig, post: Callable[[Event], None]
    ) -> LinkConnections:
        return NoLinks()
