"""A worker's streams to all routers. No other part of the worker knows how many routers there are.

A request belongs for its whole life to the router that minted its id. Its messages go to that router alone, only that
router controls it, and the end of that router's stream ends its attempts.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tandem.messages import (
    AdapterChecked,
    AdapterPlaces,
    Adapters,
    CachedPrefixes,
    ClockReply,
    Heartbeat,
    Hello,
    LinkState,
    Peer,
    Peers,
    Recalled,
    TokenEvent,
    Tokens,
    WorkerMessage,
)
from tandem.page_changes import PageChanges
from tandem.peer_union import PeerUnion
from tandem.request_ids import router_of
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.prefix_feed import CacheAccount
from tandem.worker.adapter_exchange import AdapterExchange
from tandem.worker.control_client import ControlClient
from tandem.worker.events import Event
from tandem.worker.records import RecordKeeper

logger = logging.getLogger(__name__)

# Check interval in seconds.
WATCH_INTERVAL_S = 0.5


class RouterStreams:
    def __init__(
        self,
        addresses: Iterable[str],
        hello: Hello,
        *,
        credentials: ClusterCredentials,
        heartbeat: Callable[[], Heartbeat | None],
        heartbeat_interval_s: float,
        connect_timeout_s: float,
        records: RecordKeeper,
        post: Callable[[Event], None],
        set_peers: Callable[[Sequence[Peer]], None],
        on_connected: Callable[[], None],
        adapters: AdapterExchange | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            addresses: the routers' ports for workers. A restarted router keeps its address.
            connect_timeout_s: time without any connected router after which `run` gives up.
            set_peers: receives the decode workers to link to.
            on_connected: called at every Welcome.
            adapters: None: the worker takes none.
        """
        self._adapters = adapters or AdapterExchange(post)
        self._connect_timeout_s = connect_timeout_s
        self._set_peers = set_peers
        self._records = records
        self._peers = PeerUnion(clock)
        self._account = CacheAccount()
        # Links that are up, by decode worker and its incarnation: a router that welcomes this worker knows none.
        self._links: dict[tuple[str, str], LinkState] = {}
        self._new_client = lambda address: ControlClient(
            address,
            hello,
            credentials=credentials,
            heartbeat=heartbeat,
            heartbeat_interval_s=heartbeat_interval_s,
            records=records,
            account=self._account,
            post=post,
            links=self._links.values,
            adapters=self._adapters,
            on_adapters=self._learn_adapters,
            on_peers=self._name_peers,
            on_connected=on_connected,
            on_lost=self._lose_router,
        )
        self._clients = [self._new_client(address) for address in addresses]
        # Of `run`, by address.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._has_changed = asyncio.Event()

    def send(self, messages: Sequence[WorkerMessage]) -> None:
        """Sends each message to its router, or drops it if that router has no stream."""
        self._records.note(messages)
        for message in messages:
            if isinstance(message, LinkState):
                self._note_link(message)
            elif isinstance(message, AdapterPlaces):
                self._adapters.note_places(message)
        clients = {client.router: client for client in self._clients if client.router}
        if len(clients) == 1:
            # The router ignores messages of other routers' requests.
            for client in clients.values():
                client.send(messages)
            return
        for router, own in _by_router(messages, tuple(clients)).items():
            clients[router].send(own)

    def _note_link(self, state: LinkState) -> None:
        key = state.decode_worker_id, state.decode_incarnation
        if state.up:
            self._links[key] = state
        else:
            self._links.pop(key, None)

    def _learn_adapters(self, address: str, message: Adapters) -> None:
        """Takes a router's names, and passes news on: not all routers may reach each other."""
        if news := self._adapters.merge(message):
            for client in self._clients:
                if client.address != address:
                    client.send([Adapters(tuple(news))])

    def tell_changes(self, changes: PageChanges) -> None:
        self._account.apply(changes)
        stored, removed = b"".join(changes.stored), b"".join(changes.removed)
        for client in self._clients:
            client.tell_changes(stored, removed)

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            ConnectionError: no router was connected for connect_timeout_s, or one refused this worker.
        """
        watch = asyncio.create_task(self._watch())
        changed = asyncio.create_task(self._has_changed.wait())
        self._start_clients()
        try:
            while True:
                running = [watch, *self._tasks.values()]
                ended, _ = await asyncio.wait([changed, *running], return_when=asyncio.FIRST_COMPLETED)
                if changed in ended:
                    self._has_changed.clear()
                    changed = asyncio.create_task(self._has_changed.wait())
                for task in ended:
                    # The others end only by an exception, or because their router is no longer named.
                    if task in running and not task.cancelled():
                        task.result()
        finally:
            tasks = [watch, changed, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Opens streams to new routers, and ends those to routers that are no longer named."""
        named = dict.fromkeys(addresses)
        known = {client.address: client for client in self._clients}
        self._clients = [known.get(address) or self._new_client(address) for address in named]
        for address in known.keys() - named.keys():
            if (task := self._tasks.pop(address, None)) is not None:
                task.cancel()
        self._start_clients()
        self._has_changed.set()

    def _start_clients(self) -> None:
        for client in self._clients:
            if client.address not in self._tasks:
                self._tasks[client.address] = asyncio.create_task(client.run())

    async def _watch(self) -> None:
        last_connected = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now = time.monotonic()
            if any(client.router for client in self._clients):
                last_connected = now
            elif now - last_connected > self._connect_timeout_s:
                addresses = ", ".join(client.address for client in self._clients)
                raise ConnectionError(f"no router at {addresses} for {self._connect_timeout_s:.0f} s")
            self._keep_links()

    def _name_peers(self, address: str, message: Peers) -> None:
        self._peers.set_named(address, message.peers)
        self._keep_links()

    def _keep_links(self) -> None:
        self._set_peers(self._peers.peers())

    def _lose_router(self, address: str) -> None:
        self._peers.forget_router(address)


def _by_router(messages: Sequence[WorkerMessage], routers: Sequence[str]) -> Mapping[str, list[WorkerMessage]]:
    told: dict[str, list[WorkerMessage]] = {router: [] for router in routers}
    for message in messages:
        match message:
            case LinkState() | AdapterPlaces():
                for own in told.values():
                    own.append(message)
            case Tokens():
                events: defaultdict[str, list[TokenEvent]] = defaultdict(list)
                for event in message.events:
                    events[router_of(event.request_id)].append(event)
                for router in events.keys() & told.keys():
                    told[router].append(Tokens(tuple(events[router])))
            case Hello() | Heartbeat() | CachedPrefixes() | Recalled() | ClockReply() | AdapterChecked() | Adapters():
                raise AssertionError("sent by the stream itself")
            case _:
                if (router := router_of(message.request_id)) in told:
                    told[router].append(message)
    return told
