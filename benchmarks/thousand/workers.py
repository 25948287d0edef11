"""Scripted workers with the real streams to routers (tandem/worker/router_streams.py)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.lifecycle import COMMITTED, LAST_TOKEN, LEASE_GRANTED, now_ns
from tandem.messages import (
    PROTOCOL_VERSION,
    Admit,
    Finished,
    FirstToken,
    ForwardTimes,
    Heartbeat,
    Hello,
    LinkState,
    Moment,
    PageFormat,
    Peer,
    Prefill,
    Shipped,
    TokenEvent,
    Tokens,
    WorkerStats,
)
from tandem.page_changes import PageChanges
from tandem.prefix import IDENTITY_BYTES
from tandem.router.workers.worker import Worker
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.control_client import ControlClient
from tandem.worker.events import FromRouter
from tandem.worker.heartbeat_feed import HeartbeatFeed
from tandem.worker.records import RecordKeeper
from tandem.worker.router_streams import RouterStreams

if TYPE_CHECKING:
    from benchmarks.thousand.cluster import Cluster, SimRouter

PAGE_SIZE = 16
PAGE_BYTES = 2 * 2**20
NUM_PAGES = 50_000
MAX_BATCH_SIZE = 256
WORKERS_PER_HOST = 8
HOSTS_PER_RACK = 8
PREFILL_S = 0.05
STEP_S = 0.025
TIMES = ForwardTimes(5e-3, 5e-5, 1e-9, 8e-3, 5e-5, 2e-8)


class Stream:
    """Takes the place of gRPC between a worker and a router: messages arrive at once, in order.

    Attributes:
        registered: the router's view of the worker.
    """

    def __init__(self, worker: "SimWorker", client: ControlClient, router: "SimRouter") -> None:
        self.worker, self.router = worker, router
        self.client = client
        self.registered: Worker | None = None
        self.num_sent = 0
        self.heartbeats = HeartbeatFeed()
        client._begin_stream(self)  # type: ignore[arg-type]

    @property
    def num_taken(self) -> int:
        return self.num_sent

    def send(self, messages: Sequence[Any]) -> None:
        if not messages:
            return
        self.num_sent += len(messages)
        self.router.cluster.post(lambda: self.router.take(self, messages))

    def say(self, messages: Sequence[Any]) -> None:
        """Sends the router's messages."""
        self.router.count_sent(messages)
        self.router.cluster.post(lambda: self.worker.take(self, messages))


class SimWorker:
    """
    Attributes:
        is_watched: it keeps the routers' peers, which takes too long for every worker of a thousand.
        peers: workers to link to, if watched.
    """

    def __init__(self, cluster: "Cluster", number: int, role: str, *, is_watched: bool = False) -> None:
        self.cluster = cluster
        self.worker_id, self.role = f"{role}-{number}", role
        self.incarnation = f"{self.worker_id}-0123456789ab"
        self.is_watched = is_watched
        self.peers: Sequence[Peer] = ()
        self.num_steps = 0
        self.links: dict[str, Shipped] = {}
        self._admitted: dict[str, Admit] = {}
        # Request, attempt, next index, length.
        self._running: dict[str, tuple[int, int, int]] = {}
        self._is_stepping = False
        self._stored: dict[bytes, None] = {}
        self._untold: list[bytes] = []
        host = number // WORKERS_PER_HOST
        self.hello = Hello(
            PROTOCOL_VERSION,
            self.worker_id,
            self.incarnation,
            role,
            "cuda:0",
            f"10.0.{host}.7:{20_000 + number}",
            1000 + number,
            PageFormat("fingerprint", PAGE_BYTES, "layout"),
            NUM_PAGES,
            PAGE_SIZE,
            f"10.0.{host}.7:{30_000 + number}",
            has_links=role == "both",
            host=f"host-{host}",
            rack=f"rack-{host // HOSTS_PER_RACK}",
            max_batch_size=MAX_BATCH_SIZE,
        )
        self.routers = RouterStreams(
            [router.address for router in cluster.routers],
            self.hello,
            credentials=ClusterCredentials(),
            heartbeat=self.heartbeat,
            heartbeat_interval_s=1.0,
            connect_timeout_s=1e9,
            records=RecordKeeper(2**20),
            post=self._receive,
            set_peers=self._set_peers,
            on_connected=lambda: None,
            clock=cluster.clock,
        )
        self.streams: list[Stream] = []

    def connect(self) -> None:
        for client, router in zip(self.routers._clients, self.cluster.routers, strict=True):
            self.streams.append(Stream(self, client, router))

    def heartbeat(self) -> Heartbeat:
        self.num_steps += 1
        num_tokens = len(self._running) * 100
        return Heartbeat(
            self.num_steps,
            WorkerStats(
                num_running=len(self._running),
                num_total_pages=NUM_PAGES,
                num_free_pages=NUM_PAGES - len(self._stored),
                num_cached_pages=len(self._stored),
                num_locked_pages=num_tokens // PAGE_SIZE,
                prompt_tokens_computed=self.num_steps * 1000,
                output_tokens_computed=self.num_steps * 100,
                shipped=tuple(self.links.values()),
                forward_times=TIMES,
            ),
        )

    @property
    def is_alive(self) -> bool:
        return self.cluster.workers.get(self.worker_id) is self

    def beat(self) -> None:
        if not self.is_alive:
            return
        heartbeat = self.heartbeat()
        for stream in self.streams:
            stream.send([stream.heartbeats.next(heartbeat)])

    def tell_changes(self) -> None:
        if self._untold and self.is_alive:
            self.routers.tell_changes(PageChanges(tuple(self._untold), ()))
            self._untold = []

    def open_link(self, other: "SimWorker") -> None:
        self.links[other.worker_id] = Shipped("nccl", 0, 0, other.worker_id)
        self.routers.send([LinkState(other.worker_id, other.incarnation, up=True)])

    def take(self, stream: Stream, messages: Sequence[Any]) -> None:
        names = ("Peers", "PeerChanges")
        told = [m for m in messages if self.is_watched or type(m).__name__ not in names]
        if not self.is_watched:
            stream.client._receive(told)
            return
        for message in told:
            with self.cluster.of_worker.counted(f"at a worker: {type(message).__name__}"):
                stream.client._receive([message])

    def _set_peers(self, peers: Sequence[Peer]) -> None:
        self.peers = peers

    def _receive(self, event: object) -> None:
        match event:
            case FromRouter(message=Admit() as admit):
                self._admitted[admit.request_id] = admit
            case FromRouter(message=Prefill() as prefill):
                self.cluster.call_in(PREFILL_S, lambda: self._prefill(prefill))
            case _:
                pass

    def _prefill(self, request: Prefill) -> None:
        if not self.is_alive:
            return
        request_id, attempt, index = request.request_id, request.attempt, len(request.output_ids)
        self._store(self.cluster.identities[request.prompt_ids])
        self.routers.send([FirstToken(request_id, attempt, index, 7, "", 0, len(request.prompt_ids) // PAGE_SIZE)])
        decode = self.cluster.workers.get(request.decode_worker_id)
        if decode is None:
            return
        if decode is not self:
            before, num_pages = self.links[decode.worker_id], len(request.prompt_ids) // PAGE_SIZE
            self.links[decode.worker_id] = Shipped(
                before.transport,
                before.num_pages + num_pages,
                before.num_bytes + num_pages * PAGE_BYTES,
                before.receiver_id,
                before.copying_ns + 10**6,
            )
        decode.begin(request_id, attempt, index + 1, request.sampling.max_tokens)

    def begin(self, request_id: str, attempt: int, index: int, num_tokens: int) -> None:
        if (admit := self._admitted.pop(request_id, None)) is not None:
            self._store(self.cluster.identities[admit.prompt_ids])
        self._running[request_id] = attempt, index, num_tokens
        if not self._is_stepping:
            self._is_stepping = True
            self.cluster.call_in(STEP_S, self._step)

    def _step(self) -> None:
        if not self.is_alive or not self._running:
            self._is_stepping = False
            return
        events, finished = [], []
        for request_id, (attempt, index, num_tokens) in list(self._running.items()):
            events.append(TokenEvent(request_id, attempt, index, (index,)))
            self._running[request_id] = attempt, index + 1, num_tokens
            if index + 1 == num_tokens:
                del self._running[request_id]
                moments = tuple(Moment(name, now_ns()) for name in (LEASE_GRANTED, COMMITTED, LAST_TOKEN))
                finished.append(Finished(request_id, attempt, "length", num_tokens, 0, 62, moments))
        self.routers.send([Tokens(tuple(events)), *finished])
        self.cluster.call_in(STEP_S, self._step)

    def _store(self, identities: bytes) -> None:
        for start in range(0, len(identities), IDENTITY_BYTES):
            page = identities[start : start + IDENTITY_BYTES]
            if page not in self._stored:
                self._stored[page] = None
                self._untold.append(page)
