"""The stores of other nodes as a tier of this one's. Everything here runs on the store's loop."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import grpc

from tandem.messages import PageFormat, Peer
from tandem.pagestore.server.base import AskedTier, EndedTransfer, StoredPage
from tandem.pagestore.server.peers.parts import MAX_FETCH_KEYS, MAX_LOOK_KEYS
from tandem.pagestore.server.peers.peer_store import BadPeerError, PeerStore
from tandem.pagestore.server.peers.purge_names import PurgeNames
from tandem.rpc.credentials import ClusterCredentials

MAX_QUESTIONS = 64
# Pages of answers, and time for which they count, in seconds.
MAX_KNOWN = 2**14
KNOWN_S = 10.0

_FAILURES = (grpc.RpcError, TimeoutError, ConnectionError, BadPeerError)


@dataclass(eq=False, slots=True)
class Question:
    """Attributes: tasks: one for each peer that has not answered."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class KnownPage:
    page: StoredPage
    peer: PeerStore
    expires_at: float


class PageRead(NamedTuple):
    page: StoredPage
    slot: int


@dataclass(eq=False, slots=True)
class Fetch:
    """Attributes: reads: of a run of pages; num_read: those that have ended."""

    peer: PeerStore
    reads: Sequence[PageRead]
    num_read: int = 0


class PeerTier(AskedTier):
    """Asks all peers at once, and reads each page from the first that has it.

    A purge also purges the peers: nothing that they stored before it is read from them afterwards.
    """

    def __init__(
        self,
        region: memoryview,
        page_format: PageFormat,
        credentials: ClusterCredentials,
        clock: Callable[[], float],
        on_news: Callable[[], None],
    ) -> None:
        """
        Args:
            region: all slots.
            on_news: called when there is something to take.
        """
        self._region = region
        self._format = page_format
        self._credentials = credentials
        self._clock = clock
        self._on_news = on_news
        self._peers: dict[Peer, PeerStore] = {}
        self._numbers = itertools.count(1)
        self._questions: dict[int, Question] = {}
        self._answered: list[int] = []
        self._known: OrderedDict[bytes, KnownPage] = OrderedDict()
        self._wanted: dict[PeerStore, list[PageRead]] = {}
        self._ended: list[EndedTransfer] = []
        self._fetches: set[asyncio.Task[None]] = set()
        self._others: set[asyncio.Task[None]] = set()
        self._purges = PurgeNames(clock)

    # --- peers --------------------------------------------------------------------------------------------------

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Knows exactly these peers from now on. Reads from others go on."""
        self._fetch_wanted()
        for peer in [peer for peer in self._peers if peer not in peers]:
            gone = self._peers.pop(peer)
            self._known = OrderedDict((key, known) for key, known in self._known.items() if known.peer is not gone)
            self._start(self._others, self._close_when_read(gone))
        for peer in peers:
            if peer not in self._peers:
                store = self._peers[peer] = PeerStore(peer, self._format, self._credentials, self._clock)
                store.purges = self._purges.recent()
                self._pass_on_purges(store)

    def hear_purges(self, names: Sequence[bytes]) -> bool:
        """Takes the names of other stores' purges. Returns whether one is new: this store must purge."""
        return self._purges.hear(names)

    async def stop(self) -> None:
        """Ends all calls."""
        self.close()
        await asyncio.gather(*self._fetches, *self._others, return_exceptions=True)
        for peer in self._peers.values():
            await peer.close()

    # --- questions ----------------------------------------------------------------------------------------------

    def ask(self, keys: Sequence[bytes]) -> int | None:
        up = [peer for peer in self._peers.values() if peer.is_up]
        if not up or len(self._questions) >= MAX_QUESTIONS:
            return None
        number = next(self._numbers)
        question = self._questions[number] = Question()
        asked = tuple(keys[:MAX_LOOK_KEYS])
        for peer in up:
            self._start(question.tasks, self._look(peer, asked, number, question))
        return number

    def cancel(self, question: int) -> None:
        cancelled = self._questions.pop(question, None)
        if cancelled is not None:
            for task in cancelled.tasks:
                task.cancel()

    def take_answered(self) -> Sequence[int]:
        answered, self._answered = self._answered, []
        return answered

    async def _look(self, peer: PeerStore, keys: tuple[bytes, ...], number: int, question: Question) -> None:
        run: list[StoredPage] = []
        try:
            run = await peer.look(keys)
            peer.succeeded()
        except _FAILURES as error:
            peer.failed(error)
        if self._questions.get(number) is not question:
            return
        if peer in self._peers.values():
            self._remember(run, peer)
        task = asyncio.current_task()
        others = [other for other in question.tasks if other is not task and not other.done()]
        if len(run) == len(keys) or not others:
            del self._questions[number]
            for other in others:
                other.cancel()
            self._answered.append(number)
            self._on_news()

    def _remember(self, run: Sequence[StoredPage], peer: PeerStore) -> None:
        now = self._clock()
        for page in run:
            if self.find(page.key) is None:
                self._known[page.key] = KnownPage(page, peer, now + KNOWN_S)
                self._known.move_to_end(page.key)
        while self._known and (len(self._known) > MAX_KNOWN or next(iter(self._known.values())).expires_at <= now):
            self._known.popitem(last=False)

    # --- pages --------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> StoredPage | None:
        known = self._known.get(key)
        return known.page if known is not None and known.expires_at > self._clock() and known.peer.is_up else None

    def read(self, page: StoredPage, slot: int) -> None:
        known = self._known.get(page.key)
        if known is None:
            self._end(PageRead(page, slot), ok=False)
            return
        if not self._wanted:
            # Pages that are wanted in the same turn travel in one call.
            asyncio.get_running_loop().call_soon(self._fetch_wanted)
        self._wanted.setdefault(known.peer, []).append(PageRead(page, slot))

    def write(self, page: StoredPage, slot: int) -> bool:
        return False

    def take_ended(self) -> Sequence[EndedTransfer]:
        ended, self._ended = self._ended, []
        return ended

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        # Each store tells the routers of its own pages.
        return (), ()

    def purge(self) -> None:
        self._known.clear()
        for number in list(self._questions):
            self.cancel(number)
        for task in self._fetches:
            task.cancel()
        self._end_wanted()
        names = self._purges.take_new()
        for peer in self._peers.values():
            peer.purges += names
            self._pass_on_purges(peer)

    def close(self) -> None:
        for number in list(self._questions):
            self.cancel(number)
        for task in (*self._fetches, *self._others):
            task.cancel()
        self._end_wanted()

    def _fetch_wanted(self) -> None:
        wanted, self._wanted = self._wanted, {}
        for peer, reads in wanted.items():
            first = 0
            for end in range(1, len(reads) + 1):
                is_run = end < len(reads) and reads[end].page.parent == reads[end - 1].page.key
                if not is_run or end - first == MAX_FETCH_KEYS:
                    fetch = Fetch(peer, reads[first:end])
                    task = self._start(self._fetches, self._fetch(fetch))
                    # A task that is cancelled before it has begun runs no `finally`.
                    task.add_done_callback(partial(self._end_fetch, fetch))
                    first = end

    async def _fetch(self, fetch: Fetch) -> None:
        peer, reads, size = fetch.peer, fetch.reads, self._format.page_bytes
        slots = [self._region[read.slot * size : (read.slot + 1) * size] for read in reads]
        try:
            async with peer.fetches:
                # It may have failed meanwhile.
                if peer.is_up:
                    async with aclosing(peer.fetch([read.page.key for read in reads], slots)) as arrived:
                        async for index in arrived:
                            self._end(reads[index], ok=True)
                            fetch.num_read = index + 1
                    peer.succeeded()
        except _FAILURES as error:
            peer.failed(error)

    def _end_fetch(self, fetch: Fetch, _: object) -> None:
        for read in fetch.reads[fetch.num_read :]:
            self._known.pop(read.page.key, None)
            self._end(read, ok=False)

    def _end(self, read: PageRead, *, ok: bool) -> None:
        self._ended.append(EndedTransfer(read.page, read.slot, ok))
        self._on_news()

    def _end_wanted(self) -> None:
        for reads in self._wanted.values():
            for read in reads:
                self._end(read, ok=False)
        self._wanted.clear()

    # --- tasks --------------------------------------------------------------------------------------------------

    def _pass_on_purges(self, peer: PeerStore) -> None:
        if peer.purges:
            self._start(self._others, self._send_purges(peer))

    async def _send_purges(self, peer: PeerStore) -> None:
        try:
            await peer.look(())
        except _FAILURES as error:
            # The next question carries them.
            peer.failed(error)

    async def _close_when_read(self, peer: PeerStore) -> None:
        await asyncio.gather(*self._fetches, return_exceptions=True)
        await peer.close()

    def _start(self, tasks: set[asyncio.Task[None]], coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task
