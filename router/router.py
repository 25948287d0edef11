"""The router's core."""

import asyncio
import itertools
import logging
import math
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.adapters import AdapterEntry
from tandem.lifecycle import ENDED, now_ns
from tandem.messages import (
    AdapterChecked,
    AdapterPlaces,
    Adapters,
    CachedPrefixes,
    ClockReply,
    Embedded,
    Failed,
    Finished,
    FirstToken,
    GaveBack,
    Heartbeat,
    Hello,
    LeaseLost,
    LinkState,
    NamespaceOwners,
    NotMoved,
    Peers,
    PrefillDeferred,
    Progress,
    PromptScored,
    Recalled,
    RepeatPrefixes,
    ResetCache,
    RouterMessage,
    Tokens,
    Unservable,
    Welcome,
    WorkerMessage,
)
from tandem.recording import Recorder, Recording
from tandem.request_ids import make_request_id
from tandem.router.adapters.loading import AdapterLoading
from tandem.router.adapters.metrics import adapter_metrics
from tandem.router.adapters.names import AdapterNames
from tandem.router.attempts import Attempts
from tandem.router.config import RouterConfig
from tandem.router.errors import OverloadedError, RequestTimeoutError, RequestTooLargeError, UnavailableError
from tandem.router.head_starts import MAX_AGE_NS, HeadStarts
from tandem.router.observe.live.record import LiveRecord
from tandem.router.observe.metrics import RouterMetrics
from tandem.router.observe.request_lines import KeptLines, LineSink, RequestLines, SocketLines
from tandem.router.observe.request_observers import RequestObservers, record_request
from tandem.router.observe.size_metrics import size_metrics
from tandem.router.policies.base import RoutingPolicy
from tandem.router.policies.guard import GuardedPolicy
from tandem.router.recalls import Recalls
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.clock_offsets import PROBE_INTERVAL_S, ClockOffsets
from tandem.router.requests.request_spec import RequestSpec
from tandem.router.requests.requests_in_hand import RequestsInHand
from tandem.router.requests.tracker import RequestReport, RequestTracker
from tandem.router.waiting_room import WaitingRoom
from tandem.router.worker_wait import WorkerWait
from tandem.router.workers.leans import GOOD_FOR_S, Lean, RouterDemand
from tandem.router.workers.peer_counts import NOTHING, PeerCounts, RouterCounts
from tandem.router.workers.sizes import ClusterSize
from tandem.router.workers.store_registry import StoreRegistry
from tandem.router.workers.worker import Worker
from tandem.router.workers.worker_registry import WorkerRegistry

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
# Peers named to workers between two looks, 2 µs each. While hundreds of workers join, each join changes the peers of a
# hundred others.
NAMES_PER_LOOK = 16_384
# Interval between looks at the stores' answers to a reset, in seconds.
RESET_POLL_S = 0.01
# Seconds for a client to read an ended output.
DELIVERY_TIMEOUT_S = 30.0
SHUTTING_DOWN = "the server is shutting down"


class Router:
    """One router without its sockets. Belongs to one asyncio loop.

    Attributes:
        incarnation: name of this life of the router; the prefix of its request ids.
        elsewhere: loads of the cluster's other routers.
        stores: the connected page stores.
        head_starts: head starts of resumed requests, used up here or there.
        idle: set while no request is in hand.
        kept_lines: the sink of request_lines if they wait for the supervisor, else None.
        live: recent history for the live page.
        adapters, adapter_loading: names of adapters, and their loads and unloads.
        size: numbers of processes, as last told; None: they are as configured.
    """

    def __init__(
        self, config: RouterConfig, policy: RoutingPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self.incarnation = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._arrivals = itertools.count()
        # Also of requests refused for lack of room.
        self._num_arrivals = 0
        self._requests = RequestsInHand()
        self._draining = False
        self.kept_lines = KeptLines() if config.keeps_request_lines else None
        sink: LineSink | None = self.kept_lines
        if sink is None and config.request_lines_socket:
            sink = SocketLines(config.request_lines_socket)
        self.request_lines = RequestLines(config.router_id, sink) if sink is not None else None
        self.recorder = Recorder()
        self.idle = asyncio.Event()
        self.idle.set()
        self.head_starts = HeadStarts(clock)
        self.elsewhere = PeerCounts(clock, self.head_starts.learn)
        self.stores = StoreRegistry(clock, config.heartbeat_timeout_s, planned=config.stores)
        self.workers = WorkerRegistry(
            clock,
            config.heartbeat_timeout_s,
            config.stall_timeout_s,
            config.workers if config.workers or config.starts_from_zero else None,
            config.placement,
            self.stores,
        )
        self.adapters = AdapterNames(self.incarnation, config.adapters)
        self.adapters.subscribe(self._tell_workers_of_adapters)
        self._namespace_owners: NamespaceOwners | None = None
        self.adapter_loading = AdapterLoading(self.adapters, self.workers, config.model_names)
        self.recalls = Recalls(self.workers, self.incarnation, clock)
        self.clocks = ClockOffsets()
        self._next_probe = clock()
        self._leans_until = math.inf
        self._num_names_left = NAMES_PER_LOOK
        self.size = ClusterSize(is_assumed=True) if config.starts_from_zero else None
        self.metrics = RouterMetrics(
            self.workers,
            lambda: self.num_requests,
            lambda: self.num_queued,
            lambda: self.num_waiting,
            self.not_ready_reason,
            clocks=self.clocks,
            planned=self.workers.planned,
            num_restarts=config.num_restarts,
        )
        self.metrics.add_gauge(
            "tandem_known_stored_pages",
            "Pages of all connected page stores that the router knows",
            lambda: sum(len(store.prefixes) for store in self.stores),
        )
        self.metrics.add_families(lambda: size_metrics(self.size))
        self.metrics.add_families(lambda: adapter_metrics(self.adapters, self.workers))
        self.live = LiveRecord()
        self.observers = RequestObservers(self.metrics, self.live, self.recorder, self.request_lines)
        self.observers.subscribe(self._count_adapter)
        self.live.journal.started(config.router_id, config.num_restarts)
        self._policy = GuardedPolicy(policy)
        self._worker_wait = WorkerWait(config.worker_wait_timeout_s)
        self._room = WaitingRoom(
            self.workers, self.metrics, clock, lambda: self._worker_wait.limit_s, config.max_waiting_bytes
        )
        self._attempts = Attempts(
            config,
            self._policy,
            self.workers,
            self._requests,
            self._room,
            self.metrics,
            self.clocks,
            self.live.journal,
            clock,
            self._make_id,
        )

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def wants_prefixes(self) -> bool:
        return self._policy.wants_prefixes

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first token."""
        return self._requests.num_queued

    @property
    def num_waiting(self) -> int:
        """Requests that no worker takes now."""
        return len(self._room)

    @property
    def oldest_age_s(self) -> float:
        oldest = self._requests.oldest
        return self._age_s(oldest) if oldest else 0.0

    def _age_s(self, request: ActiveRequest) -> float:
        return self._config.request_timeout_s - (request.deadline - self._clock())

    @property
    def router_names(self) -> list[str]:
        """The routers that are to run, this one included."""
        running = self.size.routers if self.size is not None else ()
        return [
            name for name in self._config.routers if not running or name in running or name == self._config.router_id
        ]

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """Kinds of processes whose number follows the load, as ClusterSize.rows."""
        return self.size.rows() if self.size is not None else []

    def not_ready_reason(self) -> str:
        """Returns why no request can be served now, nor once workers have been started for it, or ""."""
        if self._draining:
            return SHUTTING_DOWN
        if not (reason := self.workers.not_ready_reason()) or self.size is None:
            return reason
        if not all(map(self.size.starts_from_zero, self.workers.missing_roles() or ("prefill", "decode"))):
            return reason
        return f"{reason}; {self.size.refusal}" if self.size.refusal else ""

    def drain(self) -> None:
        """Refuses new requests, and fails waiting requests if there are no workers: lost ones may not come back."""
        self._draining = True
        self._attempts.give_up_waiting(self._room.lose_patience(), SHUTTING_DOWN)

    def shut_down(self) -> None:
        """Fails all requests."""
        self.drain()
        for request in self._requests:
            self._attempts.fail_request(request, SHUTTING_DOWN)

    # --- clients ---

    def make_tracker(self, spec: RequestSpec) -> RequestTracker:
        """Returns a tracker with a globally unique id."""
        return RequestTracker(self._make_id(), spec)

    def _make_id(self) -> str:
        return make_request_id(self.incarnation, next(self._numbers))

    def submit_request(self, tracker: RequestTracker) -> ActiveRequest:
        """Begins to serve a request. The caller must close it in any case.

        Raises:
            RequestTooLargeError: the request does not fit the pools even alone.
            OverloadedError: too many requests wait for their first token, or the waiting room is full.
            UnavailableError: the router is draining.
        """
        self._check_admissible(tracker)
        self._set_age(tracker)
        request = ActiveRequest(tracker, self._clock() + self._config.request_timeout_s, next(self._arrivals))
        self._requests.add(request)
        self._num_arrivals += 1
        self.idle.clear()
        self._attempts.start_attempt(request)
        self._attempts.serve_waiting()
        return request

    def stop_request(self, request: ActiveRequest) -> None:
        self._attempts.stop_request(request)

    def close_request(self, request: ActiveRequest) -> None:
        """Removes a request, and aborts an unfinished one."""
        tracker = request.tracker
        tracker.moments.setdefault(ENDED, now_ns())
        self._attempts.abort_request(request)
        self._requests.remove(request)
        if not self._requests:
            self.idle.set()

    def _check_admissible(self, tracker: RequestTracker) -> None:
        self.check_capacity(1)
        if refusal := self.workers.size_refusal(len(tracker.prompt_ids), tracker.max_output_tokens):
            raise RequestTooLargeError(refusal)
        self._room.check_space(tracker)

    def check_capacity(self, num_requests: int) -> None:
        """Raises OverloadedError or UnavailableError if `num_requests` more would be refused now."""
        if self._draining:
            raise UnavailableError(SHUTTING_DOWN)
        num_queued = self.num_queued + self.elsewhere.num_queued
        if num_queued + num_requests > self._config.max_queued_requests:
            self._num_arrivals += num_requests
            raise OverloadedError(f"{num_queued} requests wait for their first token already; try again later")
        self._room.check_space()

    def _set_age(self, tracker: RequestTracker) -> None:
        """Only an admitted request uses up the head start of its stream."""
        resumption = tracker.spec.resumption
        if resumption is not None and self.head_starts.claim(resumption.state.stream_id):
            tracker.arrival_ns = max(resumption.state.arrival_ns, tracker.arrival_ns - MAX_AGE_NS)

    def update_loads(self) -> None:
        self.elsewhere.forget_silent()
        for worker_id, load in self.elsewhere.take_changed().items():
            if (worker := self.workers.get(worker_id)) is not None:
                worker.set_load_elsewhere(load)

    def reset_caches(self) -> int:
        """Clears all workers' cached prefixes, and the page stores. Returns the number of workers."""
        # Workers tell their stores too: pages that they write just now must not follow the reset.
        self.stores.reset()
        workers = list(self.workers)
        for worker in workers:
            worker.send([ResetCache()])
        return len(workers)

    async def finish_reset(self) -> None:
        """Waits until the last reset of the page stores lasts.

        Raises UnavailableError: some of them may still find pages of before.
        """
        # Later resets must not keep the caller waiting.
        number, until = self.stores.num_resets, self.stores.reset_until
        while unreset := self.stores.unreset(number):
            if self._clock() >= until:
                reasons = "; ".join(f"{name} ({reason})" for name, reason in unreset.items())
                raise UnavailableError(f"page stores that may still find pages of before the reset: {reasons}")
            await asyncio.sleep(RESET_POLL_S)

    def stop_recording(self) -> Recording:
        for request in self._requests:
            if ENDED not in request.tracker.moments:
                num_tokens = len(request.tracker.output_ids)
                record_request(self.recorder, RequestReport(request.tracker, "in hand", num_tokens, num_tokens, ()))
        return self.recorder.stop()

    def counts(self) -> RouterCounts:
        """Returns this router's load for the others, without API keys."""
        assigned = {w.worker_id: w.assigned_here for w in self.workers if w.assigned_here != NOTHING}
        return RouterCounts(
            self.num_requests,
            self.num_queued,
            assigned=assigned,
            pid=os.getpid(),
            head_starts=self.head_starts.recent(),
        )

    # --- workers ---

    def connect_worker(
        self, hello: Hello, send: Callable[[Sequence[RouterMessage]], None], disconnect: Callable[[str], None]
    ) -> Worker:
        """Registers a worker, and ends an older control stream of it. Raises ValueError if the worker does not fit this
        cluster."""
        if refusal := self.workers.refusal(hello):
            raise ValueError(refusal)
        old = self.workers.get(hello.worker_id)
        if old is not None:
            self.lose_worker(old, "reconnected", "it has connected again")
        worker = self.workers.register(hello, send, disconnect)
        worker.set_load_elsewhere(self.elsewhere.assigned_to(hello.worker_id))
        if hello.start_s:
            self._worker_wait.note_start(hello.worker_id, hello.start_s)
        welcome = Welcome(self.incarnation, self._policy.wants_prefixes)
        worker.send([welcome, self.clocks.probe()])
        if entries := self.adapters.entries():
            worker.send([Adapters(entries)])
        if self._namespace_owners is not None:
            worker.send([self._namespace_owners])
        self._send_peers()
        logger.info("worker %s (%s) joined from %s", hello.worker_id, hello.role, hello.address)
        self.live.journal.worker_joined(hello)
        self._policy.worker_joined(worker)
        self._room.is_due = True
        self._attempts.serve_waiting()
        return worker

    def set_namespace_owners(self, owners: Sequence[str]) -> None:
        """Tells the workers whose requests may draft from each other's outputs, now and when they join."""
        self._namespace_owners = NamespaceOwners(tuple(owners))
        for worker in self.workers:
            worker.send([self._namespace_owners])

    def set_workers(self, planned: Mapping[str, str]) -> dict[str, int]:
        """Sets the planned workers' roles: new requests go to no others. Returns the requests left on each other
        worker."""
        if self.workers.set_planned(planned):
            self._room.is_due = True
            self._attempts.moves.look()
            self._attempts.serve_waiting()
        return {w.worker_id: w.assigned_here.num_requests for w in self.workers if not self.workers.stays(w)}

    def exchange_leans(self, leans: Mapping[str, Lean], size: ClusterSize | None = None) -> RouterDemand:
        """Sets the workers' leans for GOOD_FOR_S, or until the next call, and the cluster's size. Returns this router's
        demand."""
        self._leans_until = self._clock() + GOOD_FOR_S
        self.workers.set_leans(leans)
        self.size = size
        self._worker_wait.first_start_s = size.start_s if size is not None else 0.0
        return self.demand()

    def demand(self) -> RouterDemand:
        of_workers = self.workers.demand(self._attempts.prompts)
        oldest = self._requests.oldest_queued
        return replace(
            of_workers,
            arrivals=self._num_arrivals,
            num_waiting=self.num_queued,
            waiting_tokens=of_workers.waiting_tokens + self._room.num_tokens,
            oldest_wait_s=self._age_s(oldest) if oldest is not None else 0.0,
            num_unplaced=self.num_waiting,
            cpu_s=time.thread_time(),
        )

    def receive(self, worker: Worker, message: WorkerMessage) -> None:
        self.workers.record_heard(worker)
        match message:
            case Heartbeat():
                self.workers.record_heartbeat(worker, message)
            case LinkState():
                self.live.journal.link_changed(worker, message)
                self.workers.record_link_state(worker, message)
                self._room.is_due = True
            case Tokens():
                self._attempts.on_tokens(message.events)
            case (
                Progress()
                | PromptScored()
                | FirstToken()
                | Embedded()
                | Finished()
                | Failed()
                | GaveBack()
                | NotMoved()
                | LeaseLost()
                | PrefillDeferred()
                | Unservable()
            ):
                if (request := self._requests.get(message.request_id)) is not None:
                    self._attempts.on_message(request, message)
            case CachedPrefixes():
                self._receive_prefixes(worker, message)
            case Recalled():
                self.recalls.receive(worker, message)
            case AdapterPlaces():
                worker.adapters.receive(message)
            case AdapterChecked():
                self.adapter_loading.receive(worker, message)
            case Adapters():
                self.adapters.merge(message.entries)
            case ClockReply():
                if self.clocks.receive(worker.worker_id, message):
                    worker.send([self.clocks.probe()])
            case _:
                raise ValueError(f"unexpected {type(message).__name__} from a worker")
        self._attempts.serve_waiting()

    def _receive_prefixes(self, worker: Worker, message: CachedPrefixes) -> None:
        is_in_order = worker.prefixes.receive(message)
        self.metrics.prefixes_received(message, is_in_order=is_in_order)
        if not is_in_order:
            worker.send([RepeatPrefixes()])

    def _count_adapter(self, report: RequestReport) -> None:
        model = report.tracker.spec.model
        if model.adapter is not None:
            self.adapters.count_ended(model.name, report.outcome)

    def _tell_workers_of_adapters(self, news: Sequence[AdapterEntry]) -> None:
        message = Adapters(tuple(news))
        for worker in self.workers:
            worker.send([message])

    def requests_by_adapter(self) -> Counter[str]:
        """Returns the numbers of requests in hand, by content hash."""
        return Counter(request.tracker.spec.model.content_hash for request in self._requests)

    def lose_worker(self, worker: Worker, kind: str, reason: str) -> None:
        """Args: kind: label of the loss in the metrics."""
        if self.workers.get(worker.worker_id) is not worker:
            return
        if self.workers.stays(worker):
            self.metrics.fault(kind)
            logger.warning("worker %s lost: %s", worker.worker_id, reason)
            self.live.journal.worker_lost(worker.worker_id, kind, reason)
        else:
            logger.info("worker %s has left: %s", worker.worker_id, reason)
            self.live.journal.worker_left(worker.worker_id)
        self.workers.unregister(worker)
        self.recalls.lose_worker(worker)
        self.adapter_loading.lose_worker(worker)
        self.clocks.forget(worker.worker_id)
        worker.disconnect(reason)
        self._send_peers()
        self._policy.worker_lost(worker, reason)
        self._attempts.end_with_worker(worker, reason, out_of_reach=self.workers.is_out_of_reach(worker))
        self._attempts.serve_waiting()

    async def watch(self) -> None:
        while True:
            before = self._clock()
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.check_deadlines(stood_still_s=self._clock() - before - WATCH_INTERVAL_S)

    def check_deadlines(self, stood_still_s: float = 0.0) -> None:
        """Args: stood_still_s: time for which this process did not run; silent workers are excused for it."""
        if stood_still_s > WATCH_INTERVAL_S:
            self.workers.excuse_silence(stood_still_s)
            self.stores.excuse_silence(stood_still_s)
        self._num_names_left = NAMES_PER_LOOK
        self.workers.close_links()
        self._send_peers()
        # Also drops the load of a silent router.
        self.update_loads()
        for worker, kind, reason in self.workers.find_lost():
            self.lose_worker(worker, kind, reason)
        self.stores.lose_silent()
        self.stores.repeat_failed_resets()
        now = self._clock()
        if now >= self._leans_until:
            # The planner is gone.
            self.workers.set_leans({})
        if now >= self._next_probe:
            self._next_probe = now + PROBE_INTERVAL_S
            for worker in self.workers:
                worker.send([self.clocks.probe()])
        for request in self._requests.past_deadline(now):
            # Frees the workers at once, even if the client is not reading.
            reason = f"not finished within {self._config.request_timeout_s:g} s"
            self._attempts.fail_request(request, reason, RequestTimeoutError)
        for request in self._requests.without_word(now):
            self._attempts.retry_without_word(request)
        if self.size is not None and self.size.failure:
            self._attempts.give_up_waiting(self._room.find_overdue(0.0), self.size.failure)
        self._attempts.moves.look()
        waited = f"nobody came within {self._worker_wait.limit_s:g} s"
        if self.size is not None and self.size.refusal:
            waited = f"{self.size.refusal}; {waited}"
        self._attempts.give_up_waiting(self._room.find_overdue(), waited)
        self._attempts.serve_waiting()
        for request in self._requests.undelivered():
            self._check_delivery(request, now)

    def _check_delivery(self, request: ActiveRequest, now: float) -> None:
        if request.final_since is None:
            request.final_since = now
        elif now - request.final_since > DELIVERY_TIMEOUT_S and request.on_overdue is not None:
            if not request.is_given:
                logger.warning("request %s: its client does not read", request.tracker.request_id)
            request.on_overdue()

    def _send_peers(self) -> None:
        """Tells senders their changed peers: at once, but for the start of a large cluster."""
        while self._num_names_left > 0 and (worker := self.workers.take_untold()) is not None:
            peers = Peers(self.workers.peers_of(worker))
            self._num_names_left -= 1 + len(peers.peers)
            worker.send([peers])
