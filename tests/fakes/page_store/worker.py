"""A worker's process: real cache, launch list and tier, with fake jobs; and its end of the session with the store."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.launch_list import LaunchList
from tandem.messages import PROTOCOL_VERSION
from tandem.pagestore.client.events import FromStore, StoreClosed, StoreOpened
from tandem.pagestore.client.tier import StoreTier
from tandem.pagestore.messages import (
    EndFind,
    Find,
    Found,
    GaveUp,
    Purge,
    Put,
    PutGranted,
    StoreClientMessage,
    StoreHello,
    StoreRefused,
    StoreWelcome,
    Wrote,
)
from tandem.worker.events import Event
from tests.fakes.page_store.copies import PageCopy, SimCopies
from tests.fakes.page_store.engine import SimForward
from tests.fakes.page_store.jobs import JobScheduler
from tests.fakes.page_store.memory import HALVES, MARK_BYTES, PAGE_FORMAT, PAGE_SIZE, Memory, content, content_mark
from tests.fakes.page_store.session import END, SentPurge, SimSession

if TYPE_CHECKING:
    from tests.fakes.page_store.world import World


class Life(Enum):
    """EXITED: dead, but its copies may still land; GONE: its exit was seen, and the time to settle is over."""

    RUNS = "runs"
    EXITED = "exited"
    GONE = "gone"


@dataclass(frozen=True)
class Reset(Event):
    """A router's ResetCache. Attributes: number: of the reset, from 1."""

    number: int


@dataclass
class SessionView:
    """What a worker may do by the messages that it has exchanged in its present session.

    Attributes:
        epoch: "" without a session.
        asked: keys by the request's type and number.
        granted: generation and key of each slot that it may write.
        found: key of each slot that it may read, by the number of its find.
        since: number of the worker's last reset when it sent each find.
    """

    world: "World"
    epoch: str = ""
    asked: dict[tuple[type, int], tuple[bytes, ...]] = field(default_factory=dict)
    granted: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    found: dict[int, dict[int, bytes]] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)

    def mark_of(self, slot: int, is_out: bool) -> bytes:
        """Returns the content that a slot's key stands for.

        Raises:
            AssertionError: the worker may not write the slot, or read it.
        """
        if is_out:
            assert slot in self.granted, f"slot {slot} is written without a grant"
            return self.world.marks.get(self.granted[slot][1], b"")
        keys = [slots[slot] for slots in self.found.values() if slot in slots]
        assert keys, f"slot {slot} is read without a find"
        return self.world.marks.get(keys[0], b"")

    def asked_since(self, slot: int, reset: int) -> bool:
        return any(slot in slots and self.since[number] >= reset for number, slots in self.found.items())

    def received(self, message: Any) -> None:
        if isinstance(message, PutGranted):
            keys = self.asked.pop((Put, message.number))
            for key, slot, generation in zip(keys, message.slots, message.generations, strict=True):
                if slot >= 0:
                    self.granted[slot] = generation, key
        elif isinstance(message, Found) and message.number in self.found:
            keys = self.asked[Find, message.number][message.first :]
            self.found[message.number].update(zip(message.slots, keys, strict=False))

    def sent(self, message: StoreClientMessage, seen_reset: int) -> None:
        if isinstance(message, Put | Find):
            request = type(message), message.number
            assert request not in self.asked, "two requests have one number"
            assert len(message.keys) > 0, "an empty request"
            self.asked[request] = message.keys
            if isinstance(message, Find):
                self.found[message.number] = {}
                self.since[message.number] = seen_reset
        elif isinstance(message, EndFind):
            self.asked.pop((Find, message.number), None)
            self.found.pop(message.number, None)
        elif isinstance(message, Wrote | GaveUp):
            for slot, generation in zip(message.slots, message.generations, strict=True):
                assert self.granted.pop(slot, (-1, b""))[0] == generation, f"slot {slot} is given back, but not granted"


class SimWorker:
    """One life of a worker.

    Attributes:
        inbox: events for its engine thread.
        outbox: messages of its engine thread that the asyncio thread has not sent yet.
        late: messages of a former life of the store that have not reached the engine thread.
        has_begun: it has opened a session once, so it may copy.
        seen_reset: number of the last reset that it has carried out.
    """

    def __init__(self, world: "World", name: str, num_pages: int) -> None:
        self.world, self.name = world, name
        number = next(world.numbers)
        self.incarnation = f"{name}-life{number}"
        self.pid = 1000 + number
        self.life = Life.RUNS
        self.paused = False
        self.inbox: deque[Event] = deque()
        self.outbox: deque[tuple[str, StoreClientMessage, int]] = deque()
        self.late: list[tuple[str, Any]] = []
        self.session: SimSession | None = None
        self.may_dial = True
        self.has_begun = False
        self.view = SessionView(world)
        # A worker that starts has nothing to forget.
        self.seen_reset = world.num_resets
        self.pool = Memory(num_pages)
        self.launches = LaunchList(PAGE_SIZE)
        self.forwards: deque[SimForward] = deque()
        self.cache = CacheManager(num_pages, PAGE_SIZE)
        self.tier = StoreTier(
            self.cache,
            self.launches,
            SimCopies(self),
            PAGE_FORMAT,
            self._send,
            world.clock,
            lambda cached_len, num_tokens: world.compute_s(num_tokens),
            world.write_after,
        )
        self.jobs = JobScheduler(self)
        # Loaded pages that have not entered the tree.
        self._loaded: dict[int, tuple[PageCopy, bytes]] = {}
        self._num_checks = 0

    @property
    def alive(self) -> bool:
        return self.life is Life.RUNS

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused

    def is_gone(self) -> bool:
        return self.life is Life.GONE

    # --- engine thread ---

    def turn(self) -> bool:
        """Runs one turn of the engine thread; returns whether anything happened."""
        worked = bool(self.inbox)
        while self.inbox:
            self._take(self.inbox.popleft())
        num_sent = len(self.outbox)
        worked |= self.tier.settle()
        worked |= self.jobs.step()
        worked |= len(self.outbox) > num_sent
        self.check_owners()
        return worked

    def _take(self, event: Event) -> None:
        if isinstance(event, Reset):
            self.cache.drop_cached_pages()
            self.seen_reset = event.number
            self.world.resets.seen(self, event.number)
            self.tier.reset()
            return
        if isinstance(event, StoreOpened):
            self.view = SessionView(self.world, event.epoch)
        elif isinstance(event, FromStore) and event.epoch == self.view.epoch:
            self.view.received(event.message)
        elif isinstance(event, StoreClosed):
            self.view = SessionView(self.world)
        self.tier.receive(event)

    def _send(self, epoch: str, message: StoreClientMessage) -> None:
        assert epoch == self.view.epoch and epoch, f"{message} is sent outside of a session"
        if isinstance(message, Wrote | GaveUp):
            busy = {copy.slot for copy in self.world.copies if copy.worker is self and copy.is_out}
            assert not busy & set(message.slots), (
                f"slots {busy & set(message.slots)} are given back while being written"
            )
        elif isinstance(message, EndFind):
            busy = {copy.slot for copy in self.world.copies if copy.worker is self and not copy.is_out}
            # Another find may have the same page.
            others = {slot for number, slots in self.view.found.items() if number != message.number for slot in slots}
            ended = set(self.view.found.get(message.number, ())) - others
            assert not busy & ended, f"slots {busy & ended} are given back while being read"
        self.view.sent(message, self.seen_reset)
        self.outbox.append((epoch, message, self.seen_reset))

    def _quiet(self) -> None:
        assert not self.may_dial, "a session is declared quiet twice"
        assert not any(copy.worker is self for copy in self.world.copies), "copies run in a session that is quiet"
        self.may_dial = True

    # --- asyncio thread ---

    def dial(self) -> bool:
        store = self.world.store
        if not self.may_dial or self.session is not None or not store.alive:
            return False
        self.session = SimSession(f"s{next(self.world.numbers)}", self, store)
        self.has_begun = True
        self.session.up.append(StoreHello(PROTOCOL_VERSION, self.name, self.incarnation, self.pid, PAGE_FORMAT))
        self.world.sessions.append(self.session)
        return True

    def flush(self) -> bool:
        """Sends the engine thread's messages, unless their session has ended."""
        worked = bool(self.outbox)
        while self.outbox:
            epoch, message, number = self.outbox.popleft()
            if self.session is not None and self.session.epoch == epoch and not self.session.is_cut:
                self.session.send_up(SentPurge(message.number, number) if isinstance(message, Purge) else message)
        return worked

    def deliver(self, session: SimSession) -> None:
        """Takes the next message of the session from the store."""
        message: Any = session.down.popleft()
        if message is END:
            self._ended(session)
        elif isinstance(message, StoreWelcome):
            session.epoch = message.epoch
            self.late = [(epoch, late) for epoch, late in self.late if epoch != message.epoch]
            self.may_dial = False
            self.inbox.append(StoreOpened(message.epoch, message.num_slots))
        elif isinstance(message, StoreRefused):
            raise AssertionError(f"{self.incarnation} is refused: {message.reason}")
        else:
            self.inbox.append(FromStore(session.epoch, message))

    def deliver_late(self) -> bool:
        """A message of a former life of the store overtakes the end of its session."""
        if not self.late:
            return False
        epoch, message = self.late.pop(0)
        self.inbox.append(FromStore(epoch, message))
        return True

    def _ended(self, session: SimSession) -> None:
        session.open_at_worker = False
        assert self.session is session
        self.session = None
        if session.epoch:
            self.inbox.append(StoreClosed(session.epoch, self._quiet))

    # --- device ---

    def run_device(self) -> bool:
        if not self.forwards:
            return False
        self.forwards[0].run(self.pool, self.world.num_resets, self.incarnation)
        if self.forwards[0].done():
            self.forwards.popleft()
        return True

    def landed(self, copy: PageCopy) -> None:
        # Between two workers' purges, one may load what the other had computed before.
        stamp = max(self.pool.stamp(copy.page_id), copy.seen_reset)
        for half in HALVES:
            self.pool.write(copy.page_id, half, content(self.pool.read(copy.page_id, half)[:MARK_BYTES], stamp))
        self._loaded[copy.page_id] = copy, self.pool.read(copy.page_id, HALVES[0])

    # --- checks ---

    def check_nothing_yields(self) -> None:
        """Checks that no copy holds a page that the pool would get back."""
        held = {copy.page_id for copy in self.world.copies if copy.worker is self and not self.jobs.holds(copy.page_id)}
        assert not held, f"{self.incarnation}: growth gives back while copies hold pages {held}"

    def check_owners(self) -> None:
        """Lets the parts recount the owners of all pages."""
        self._num_checks += 1
        if self.world.is_recount_due(self._num_checks):
            violation = self.cache.check_integrity() or self.tier.check_integrity()
            assert not violation, f"{self.incarnation}: {violation}"

    def check_contents(self) -> None:
        """Checks the pages that somebody may read or write at any moment from now on."""
        free = set(self.cache._allocator.free_pages())
        for forward in self.forwards:
            assert not forward.page_ids & free, f"{self.incarnation}: a forward in flight uses free pages"
        unwritten = {page for launch in self.launches._launches if not launch.output.done() for page in launch.written}
        in_tree, withheld = self._check_tree(unwritten)
        for copy in self.world.copies:
            if copy.worker is self:
                page = copy.page_id
                assert page not in free, f"{self.incarnation}: page {page} is freed while it is being copied"
                assert copy.is_out or page not in in_tree, (
                    f"{self.incarnation}: page {page} is in the tree before it is loaded"
                )
        # Pages in use survive a reset; the tree withholds them from the store.
        for page in (free | unwritten | withheld) & self._loaded.keys():
            del self._loaded[page]
        for page in in_tree & self._loaded.keys():
            copy, loaded = self._loaded.pop(page)
            # Between two checks, a loaded page may enter the tree, leave it, and get other content.
            is_current = self.pool.read(page, HALVES[0]) != loaded or self.pool.stamp(page) >= self.seen_reset
            assert copy.seen_reset == self.seen_reset or is_current, (
                f"{self.incarnation}: page {page}, loaded before a reset, enters the tree after it"
            )

    def _check_tree(self, unwritten: set[int]) -> tuple[set[int], set[int]]:
        """Checks that each page in the tree holds its tokens, unless a forward pass is writing it.

        Returns these pages, and those of them that the store is never offered.
        """
        tree = self.cache._tree
        seen, withheld = set(), set()
        stack = [
            (node, tree._namespaces[id(root)], ()) for root in tree._roots.values() for node in root.children.values()
        ]
        while stack:
            node, namespace, before = stack.pop()
            tokens = (*before, *node.key)
            seen.add(node.page_id)
            if node.is_withheld:
                withheld.add(node.page_id)
            assert node.page_id in unwritten or self.pool.holds(node.page_id, content_mark(namespace, tokens)), (
                f"{self.incarnation}: page {node.page_id} in the tree holds other tokens than {tokens} of {namespace!r}"
            )
            stack += [(child, namespace, tokens) for child in node.children.values()]
        return seen, withheld
