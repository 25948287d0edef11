"""The router's core: which requests are in hand, which workers there are, and what has taken too long."""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from router.active_request import RequestStream
from router.attempts import Attempts
from router.config import RouterConfig
from router.errors import OverloadedError, RequestTooLargeError, UnavailableError
from router.metrics import RouterMetrics
from router.policies.base import RoutingPolicy
from router.tracker import RequestState, RequestTracker
from router.worker_registry import Worker, WorkerRegistry
from tandem.lifecycle import ENDED, now_ns
from tandem.messages import (
    Failed,
    Finished,
    FirstToken,
    GaveBack,
    Heartbeat,
    Hello,
    LeaseLost,
    LinkState,
    Peers,
    PrefillDeferred,
    RouterMessage,
    Tokens,
    Welcome,
    WorkerMessage,
)
from tandem.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
# From the end of an output until its client has taken it.
DELIVERY_TIMEOUT_S = 30.0
SHUTTING_DOWN = "the server is shutting down"


class Router:
    """Everything of one router that is not a socket. Belongs to one asyncio loop.

    Attributes:
        idle: set while no request is in hand.
    """

    def __init__(
        self, config: RouterConfig, policy: RoutingPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._incarnation = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._streams: dict[str, RequestStream] = {}
        self._draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.workers = WorkerRegistry(clock, config.heartbeat_timeout_s, config.stall_timeout_s)
        self.metrics = RouterMetrics(
            self.workers, lambda: self.num_requests, lambda: self.num_queued, self.not_ready_reason
        )
        self._attempts = Attempts(config, policy, self.workers, self.metrics, clock)

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first token."""
        return sum(not stream.tracker.output_ids for stream in self._streams.values())

    def not_ready_reason(self) -> str:
        """Why no request would be served now, or ""."""
        return SHUTTING_DOWN if self._draining else self.workers.not_ready_reason()

    def drain(self) -> None:
        """From now on, new requests are refused; those in hand go on."""
        self._draining = True

    def shut_down(self) -> None:
        """Ends what is in hand too, in words that tell a client to try elsewhere."""
        self.drain()
        for stream in list(self._streams.values()):
            if not stream.tracker.is_final:
                stream.end_attempt(tell_workers=True)
                self._attempts.fail(stream, SHUTTING_DOWN)

    # --- clients ---

    def track(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_namespace: str = "",
        moments: Mapping[str, int],
    ) -> RequestTracker:
        """Makes a tracker with an id that no other request ever had, on this router or on an earlier one."""
        request_id = f"{self._incarnation}-{next(self._numbers)}"
        tracker = RequestTracker(request_id, tuple(prompt_ids), sampling, priority, cache_namespace)
        tracker.moments.update(moments)
        return tracker

    def open(self, tracker: RequestTracker) -> RequestStream:
        """Begins to serve a request; its stream is to be closed whatever happens. How it ends, the stream's tokens and
        its tracker's state say.

        Raises:
            RequestTooLargeError: it would not fit the pools even alone.
            OverloadedError: max_queued_requests wait already.
            UnavailableError: the router is draining.
        """
        self._check_admissible(tracker)
        stream = self._streams[tracker.request_id] = RequestStream(
            tracker, self._clock() + self._config.request_timeout_s
        )
        self.idle.clear()
        self._attempts.start(stream)
        return stream

    def stop(self, stream: RequestStream) -> None:
        """A stop string has ended the output, which only the client's side of the router can see."""
        stream.end_attempt(tell_workers=stream.tracker.state is RequestState.RUNNING)
        stream.tracker.stop()

    def close(self, stream: RequestStream) -> None:
        """The client is done with a request, or the request with the client."""
        tracker = stream.tracker
        tracker.moments.setdefault(ENDED, now_ns())
        stream.end_attempt(tell_workers=tracker.state is RequestState.RUNNING)
        tracker.abort()
        del self._streams[tracker.request_id]
        if not self._streams:
            self.idle.set()

    def _check_admissible(self, tracker: RequestTracker) -> None:
        """Refuses what would fail later or make others wait for ever."""
        self.check_room(1)
        num_tokens = len(tracker.prompt_ids) + tracker.sampling.max_tokens
        limit = self.workers.max_request_tokens()
        if self.workers.pairs() and num_tokens > limit:
            raise RequestTooLargeError(
                f"{len(tracker.prompt_ids)} prompt tokens and {tracker.sampling.max_tokens} output tokens do not fit "
                f"the workers' {limit} tokens of KV memory"
            )

    def check_room(self, num_requests: int) -> None:
        """Whether so many more would be taken in now.

        Raises:
            OverloadedError: too many wait already.
            UnavailableError: the router is draining.
        """
        if self._draining:
            raise UnavailableError(SHUTTING_DOWN)
        if self.num_queued + num_requests > self._config.max_queued_requests:
            raise OverloadedError(f"{self.num_queued} requests wait for their first token already; try again later")

    # --- workers ---

    def connect(
        self, hello: Hello, send: Callable[[Sequence[RouterMessage]], None], disconnect: Callable[[str], None]
    ) -> Worker:
        """A worker's stream has begun. An older stream of the same worker ends now.

        Raises:
            ValueError: it cannot be part of this cluster; the message says why.
        """
        if refusal := self.workers.refusal(hello):
            raise ValueError(refusal)
        old = self.workers.get(hello.worker_id)
        if old is not None:
            self.lose(old, "reconnected", "it has connected again")
        worker = self.workers.add(hello, send, disconnect)
        worker.send([Welcome(self._incarnation)])
        self._send_peers()
        logger.info("worker %s (%s) joined from %s", hello.worker_id, hello.role, hello.address)
        return worker

    def receive(self, worker: Worker, message: WorkerMessage) -> None:
        """A message on a worker's stream."""
        self.workers.heard(worker)
        match message:
            case Heartbeat():
                self.workers.heartbeat(worker, message)
            case LinkState():
                self.workers.link_state(worker, message)
            case Tokens():
                for event in message.events:
                    if (stream := self._streams.get(event.request_id)) is not None:
                        self._attempts.on_tokens(stream, event)
            case FirstToken() | Finished() | Failed() | GaveBack() | LeaseLost() | PrefillDeferred():
                if (stream := self._streams.get(message.request_id)) is not None:
                    self._attempts.on_message(stream, message)
            case _:
                raise ValueError(f"unexpected {type(message).__name__} from a worker")

    def lose(self, worker: Worker, kind: str, reason: str) -> None:
        """A worker's stream ended, or it must: so do its attempts.

        Args:
            kind: what the loss counts as.
        """
        if self.workers.get(worker.worker_id) is not worker:
            return
        self.metrics.fault(kind)
        logger.warning("worker %s lost: %s", worker.worker_id, reason)
        self.workers.remove(worker)
        worker.disconnect(reason)
        self._send_peers()
        for stream in list(self._streams.values()):
            if worker not in stream.workers:
                continue
            if stream.pair is not None and worker is not stream.pair.decode and stream.tracker.has_first_token:
                # The pages may be at the decode worker already: it knows.
                stream.decode_deadline = self._clock() + self._config.decode_word_timeout_s
            else:
                self._attempts.retry_after_loss(stream, f"worker {worker.worker_id} was lost: {reason}")

    async def watch(self) -> None:
        """Looks for workers that have fallen silent, until cancelled."""
        while True:
            before = self._clock()
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.check_deadlines(stood_still_s=self._clock() - before - WATCH_INTERVAL_S)

    def check_deadlines(self, stood_still_s: float = 0.0) -> None:
        """Ends what has taken too long.

        Args:
            stood_still_s: how long this process itself could not listen: nobody's silence meanwhile counts.
        """
        if stood_still_s > WATCH_INTERVAL_S:
            self.workers.excuse(stood_still_s)
        for worker, kind, reason in self.workers.lost():
            self.lose(worker, kind, reason)
        now = self._clock()
        for stream in list(self._streams.values()):
            if now >= stream.deadline and not stream.tracker.is_final:
                # Its workers are free at once, though its client may not be reading.
                stream.timed_out = True
                stream.end_attempt(tell_workers=True)
                self._attempts.fail(stream, f"not finished within {self._config.request_timeout_s:g} s")
            elif stream.tracker.is_final:
                self._check_delivery(stream, now)
            elif stream.decode_deadline is not None and now >= stream.decode_deadline:
                self._attempts.retry_after_loss(
                    stream, "the prefill worker was lost, and the decode worker says nothing"
                )

    def _check_delivery(self, stream: RequestStream, now: float) -> None:
        """A client that does not take what is ready for it must not count as served for ever."""
        if stream.final_since is None:
            stream.final_since = now
        elif now - stream.final_since > DELIVERY_TIMEOUT_S and stream.on_overdue is not None:
            if not stream.is_given:
                logger.warning("request %s: its client does not read", stream.tracker.request_id)
            stream.on_overdue()

    def _send_peers(self) -> None:
        peers = Peers(self.workers.peers())
        for worker in self.workers:
            if worker.role == "prefill":
                worker.send([peers])
