"""The router's core: takes tokenized requests, has workers serve them, and passes their tokens on."""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from router.policies.base import Policy
from router.registry import Registry, Worker
from router.tracker import RequestState, RequestTracker
from tandem.config import RouterConfig
from tandem.lifecycle import ASSIGNED, ENDED, FIRST_TOKEN_SENT, now_ns
from tandem.messages import (
    Abort,
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


class UnavailableError(Exception):
    """No worker can serve the request now."""


class RequestTooLargeError(ValueError):
    """The request does not fit the workers' pools."""


@dataclass(eq=False, slots=True)
class _Stream:
    """A tracked request, the workers of its attempt, and the queue its client reads: tokens, then None at its end."""

    tracker: RequestTracker
    workers: tuple[Worker, ...] = ()
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)


class Router:
    """Everything of one router that is not a socket. Belongs to one asyncio loop."""

    def __init__(self, config: RouterConfig, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._policy = policy
        self._incarnation = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._streams: dict[str, _Stream] = {}
        self.registry = Registry(clock, config.heartbeat_timeout_s, config.stall_timeout_s)

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    # --- clients ---

    def track(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, priority: int, moments: dict[str, int]
    ) -> RequestTracker:
        """Makes a tracker with an id that no other request ever had, on this router or on an earlier one."""
        request_id = f"{self._incarnation}-{next(self._numbers)}"
        tracker = RequestTracker(request_id, tuple(prompt_ids), sampling, priority)
        tracker.moments.update(moments)
        return tracker

    async def generate(self, tracker: RequestTracker) -> AsyncGenerator[list[int], None]:
        """Serves a request; yields its tokens as they come. Closing the generator early aborts the request.

        Raises:
            UnavailableError: no workers, or none that finished it within max_attempts.
            RequestTooLargeError: it would not fit the pools even alone.
        """
        num_tokens = len(tracker.prompt_ids) + tracker.sampling.max_tokens
        limit = self.registry.max_request_tokens()
        if self.registry.pairs() and num_tokens > limit:
            raise RequestTooLargeError(
                f"{len(tracker.prompt_ids)} prompt tokens and {tracker.sampling.max_tokens} output tokens do not fit "
                f"the workers' {limit} tokens of KV memory"
            )
        stream = self._streams[tracker.request_id] = _Stream(tracker)
        try:
            self._start(stream)
            while (token_ids := await stream.tokens.get()) is not None:
                tracker.moments.setdefault(FIRST_TOKEN_SENT, now_ns())
                yield token_ids
        finally:
            tracker.moments[ENDED] = now_ns()
            if tracker.state is RequestState.RUNNING:
                self._leave_workers(stream)
            tracker.abort()
            del self._streams[tracker.request_id]
        if tracker.state is RequestState.FAILED:
            raise UnavailableError(tracker.failure)

    # --- workers ---

    def connect(
        self, hello: Hello, send: Callable[[Sequence[RouterMessage]], None], disconnect: Callable[[str], None]
    ) -> Worker:
        """A worker's stream has begun. An older stream of the same worker ends now.

        Raises:
            ValueError: it cannot be part of this cluster; the message says why.
        """
        old = self.registry.get(hello.worker_id)
        if old is not None:
            self.lose(old, "it has connected again")
        if refusal := self.registry.refusal(hello):
            raise ValueError(refusal)
        worker = self.registry.add(hello, send, disconnect)
        worker.send([Welcome(self._incarnation)])
        self._send_peers()
        logger.info("worker %s (%s) joined from %s", hello.worker_id, hello.role, hello.address)
        return worker

    def receive(self, worker: Worker, message: WorkerMessage) -> None:
        """A message on a worker's stream."""
        match message:
            case Heartbeat():
                self.registry.heartbeat(worker, message)
            case LinkState():
                self.registry.link_state(worker, message)
            case Tokens():
                for event in message.events:
                    if (stream := self._streams.get(event.request_id)) is not None:
                        self._pass_on(stream, stream.tracker.on_tokens(event))
            case FirstToken():
                if (stream := self._streams.get(message.request_id)) is not None:
                    self._pass_on(stream, stream.tracker.on_first_token(message))
            case Finished():
                if (stream := self._streams.get(message.request_id)) is not None:
                    stream.tracker.on_finished(message)
                    self._end_if_finished(stream)
            case Failed():
                self._retry(message.request_id, message.attempt, message.reason, message.retryable)
            case GaveBack():
                self._retry(message.request_id, message.attempt, "the decode worker ran out of pages")
            case LeaseLost():
                self._retry(message.request_id, message.attempt, "the decode worker lost the request's pages")
            case PrefillDeferred():
                self._retry(message.request_id, message.attempt, "the decode worker had no room")
            case _:
                raise ValueError(f"unexpected {type(message).__name__} from a worker")

    def lose(self, worker: Worker, reason: str) -> None:
        """A worker's stream ended, or it must: so do its attempts."""
        if self.registry.get(worker.worker_id) is not worker:
            return
        logger.warning("worker %s lost: %s", worker.worker_id, reason)
        self.registry.remove(worker)
        worker.disconnect(reason)
        self._send_peers()
        for stream in list(self._streams.values()):
            tracker = stream.tracker
            if worker in stream.workers:
                self._retry(tracker.request_id, tracker.attempt, f"worker {worker.worker_id} was lost: {reason}")

    async def watch(self) -> None:
        """Looks for workers that have fallen silent, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            for worker, reason in self.registry.lost():
                self.lose(worker, reason)

    # --- attempts ---

    def _start(self, stream: _Stream) -> None:
        """Starts the next attempt, or fails the request if there is nobody to serve it."""
        tracker = stream.tracker
        pairs = self.registry.pairs()
        if not pairs:
            self._fail(stream, self.registry.not_ready_reason())
            return
        if tracker.attempt + 1 >= self._config.max_attempts:
            self._fail(stream, f"given up after {self._config.max_attempts} attempts")
            return
        pair = self._policy.choose(pairs, tracker.prompt_ids)
        admit, prefill = tracker.start_attempt(
            pair.prefill.worker_id, pair.decode.worker_id, self._config.admit_duration_s
        )
        stream.workers = (pair.prefill,) if pair.prefill is pair.decode else (pair.prefill, pair.decode)
        for worker in stream.workers:
            worker.num_assigned += 1
        tracker.moments[ASSIGNED] = now_ns()
        pair.decode.send([admit])
        pair.prefill.send([prefill])

    def _retry(self, request_id: str, attempt: int, reason: str, retryable: bool = True) -> None:
        stream = self._streams.get(request_id)
        if stream is None or not stream.tracker.is_current(attempt):
            return
        logger.info("request %s attempt %d ended: %s", request_id, attempt, reason)
        self._leave_workers(stream)
        stream.tracker.end_attempt()
        if retryable:
            self._start(stream)
        else:
            self._fail(stream, reason)

    def _fail(self, stream: _Stream, reason: str) -> None:
        stream.tracker.fail(reason)
        stream.tokens.put_nowait(None)

    def _pass_on(self, stream: _Stream, token_ids: list[int]) -> None:
        if token_ids:
            stream.tokens.put_nowait(token_ids)
            self._end_if_finished(stream)

    def _end_if_finished(self, stream: _Stream) -> None:
        if stream.tracker.state is RequestState.FINISHED and stream.workers:
            self._release_workers(stream)
            stream.tokens.put_nowait(None)

    def _leave_workers(self, stream: _Stream) -> None:
        """Tells the attempt's workers, by name, that it has ended."""
        for worker in stream.workers:
            worker.send([Abort(stream.tracker.request_id, stream.tracker.attempt)])
        self._release_workers(stream)

    def _release_workers(self, stream: _Stream) -> None:
        for worker in stream.workers:
            worker.num_assigned -= 1
        stream.workers = ()

    def _send_peers(self) -> None:
        peers = Peers(self.registry.peers())
        for worker in self.registry:
            if worker.role == "prefill":
                worker.send([peers])
