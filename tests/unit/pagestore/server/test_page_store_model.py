"""Any order of messages, deaths, restarts and ended transfers: every page read holds the mark of its key.

Pages are named by their path: "ab" follows "a". A mark is the name that was last written into a slot. Without slower
tiers the model predicts each answer and each eviction exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.pagestore.messages import (
    DISK,
    HOST,
    NO_ROOM,
    PEER,
    PRESENT,
    EndFind,
    Find,
    Found,
    GaveUp,
    Purge,
    Put,
    PutGranted,
    StoreWelcome,
    Wrote,
)
from tandem.pagestore.server.page_store import PageStore
from tests.fakes.clock import FakeClock
from tests.fakes.slow_tier import FakeAskedTier, FakeSlowTier
from tests.fakes.store_client import hello, identity, key, stored_page

LETTERS = "abc"
PATHS = st.text(LETTERS, min_size=1, max_size=3)
NAMES = [a + b + c for a in LETTERS for b in ("", *LETTERS) for c in ("", *LETTERS)]
# Seldom true: of events that leave little to happen.
SELDOM = st.integers(0, 3).map(lambda number: number == 3)
FIRSTS = st.sampled_from([1, 1, 1, 2, 3])
NAME_OF_IDENTITY = {identity(name): name for name in NAMES}
NAME_OF_KEY = {key(name): name for name in NAMES}
WORKERS = 3


def namespace_of(name: str) -> str:
    return name[0]


def prefixes(path: str, first: int = 1) -> list[str]:
    return [path[:end] for end in range(first, len(path) + 1)]


@dataclass(eq=False)
class Read:
    """A find that a worker may still copy from."""

    session: str
    number: int
    names: list[str]
    slots: list[int] = field(default_factory=list)
    num_coming: int = 0
    is_asking: bool = False


@dataclass(eq=False)
class Worker:
    """A process. Copies may run, whatever became of the session, until the process says otherwise or is gone."""

    pid: int
    session: str | None = None
    is_gone: bool = False
    writes: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)  # name and session by slot, generation
    reads: list[Read] = field(default_factory=list)


@dataclass(eq=False)
class Entry:
    """A page of the store. The model learns the generation of a page read from a slower tier with its first answer."""

    name: str
    slot: int
    generation: int | None
    is_ready: bool
    use: int
    pins: int = 0
    is_listed: bool = True


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(1, 6),
        has_tiers=st.booleans(),
        share=st.sampled_from([1.0, 1.0, 0.5]),
        on_disk=st.sets(PATHS, min_size=2, max_size=6),
        at_peers=st.sets(PATHS, max_size=6),
    )
    def begin(self, num_slots: int, has_tiers: bool, share: float, on_disk: set[str], at_peers: set[str]) -> None:
        self.num_slots = num_slots
        self.has_tiers = has_tiers
        self.share = share
        self.clock = FakeClock()
        self.marks: dict[int, str] = {}
        self.num_names = 0
        self.pids = 0
        self.workers = [self.new_worker() for _ in range(WORKERS)]
        self.exiting: list[Worker] = []
        self.history: list[tuple[int, int]] = [(0, 1)]
        self.disk, self.peers = FakeSlowTier(2), FakeAskedTier()
        for tier, paths in ((self.disk, on_disk), (self.peers, at_peers)):
            for path in sorted(paths):
                for name in prefixes(path):
                    tier.add(stored_page(name, name[:-1], namespace_of(name)))
        self.start_store({})

    def start_store(self, former: dict[int, Callable[[], bool]]) -> None:
        tiers = [(DISK, self.disk), (PEER, self.peers)] if self.has_tiers else []
        self.store = PageStore(self.num_slots, self.clock, tiers, former, self.share)
        self.former = set(former)
        self.generations: set[tuple[int, int]] = set()
        self.by_name: dict[str, Entry] = {}
        self.by_slot: dict[int, Entry] = {}
        self.tick = 0

    def new_worker(self) -> Worker:
        self.pids += 1
        return Worker(self.pids)

    def new_name(self) -> str:
        self.num_names += 1
        return f"session-{self.num_names}"

    # --- what the store did -------------------------------------------------------------------------------------

    def processes(self) -> list[Worker]:
        return [*self.workers, *self.exiting]

    def users(self, slot: int) -> list[str]:
        """Who may still touch a slot."""
        return [
            *(f"writer {w.pid}" for w in self.processes() for s, _ in w.writes if s == slot),
            *(f"reader {w.pid}" for w in self.processes() for read in w.reads for s in read.slots if s == slot),
            *("reading" for tier in (self.disk, self.peers) if slot in tier.reads),
            *("written out" for tier in (self.disk, self.peers) if slot in tier.writes),
        ]

    def evictable(self, namespace: str | None = None) -> list[Entry]:
        parents = {entry.name[:-1] for entry in self.by_name.values()}
        return [
            entry
            for entry in self.by_name.values()
            if entry.is_ready
            and not entry.pins
            and entry.slot not in self.disk.writes
            and entry.name not in parents
            and namespace in (None, namespace_of(entry.name))
        ]

    def room(self, namespace: str) -> tuple[bool, list[Entry]]:
        """Returns whether a slot is free for a page of the namespace, and else the pages that may go for it."""
        limit = max(int(self.num_slots * self.share), 1)
        if limit < self.num_slots and sum(namespace_of(e.name) == namespace for e in self.by_slot.values()) >= limit:
            return False, self.evictable(namespace)
        return len(self.by_slot) < self.num_slots, self.evictable()

    def drop(self, entry: Entry) -> None:
        if entry.is_listed:
            entry.is_listed = False
            del self.by_name[entry.name]
        if entry.is_ready and entry.pins == 0 and entry.slot not in self.disk.writes:
            del self.by_slot[entry.slot]

    def add(self, entry: Entry) -> None:
        assert entry.slot not in self.by_slot, "a slot has two pages"
        assert entry.name not in self.by_name, "a key has two pages"
        self.by_slot[entry.slot] = self.by_name[entry.name] = entry

    def removed(self) -> set[str]:
        changes = self.store.take_changes()
        return {NAME_OF_IDENTITY[i] for i in changes[HOST].removed} if HOST in changes else set()

    def follow(self) -> None:
        """Takes over what the store did by itself: evictions for reads, new reads, further answers."""
        removed = self.removed()
        for name in removed:
            entry = self.by_name[name]
            assert entry.is_ready and not entry.pins and entry.slot not in self.disk.writes, "evicted in use"
            self.drop(entry)
        for tier in (self.disk, self.peers):
            for slot, page in tier.reads.items():
                if slot not in self.by_slot:
                    assert self.users(slot) == ["reading"]
                    assert not self.former
                    self.add(Entry(NAME_OF_KEY[page.key], slot, None, False, self.tick))
        orphans = [name for name in self.by_name if name[:-1] in removed]
        assert not orphans, f"parents of {orphans} were evicted"
        for session, messages in self.store.take_outgoing().items():
            for message in messages:
                assert isinstance(message, Found)
                self.take_found(session, message)

    def take_found(self, session: str, found: Found) -> None:
        (read,) = [r for w in self.processes() for r in w.reads if (r.session, r.number) == (session, found.number)]
        assert found.first == len(read.slots)
        assert len(found.slots) == len(found.generations) == len(found.tiers)
        for slot, generation, tier in zip(found.slots, found.generations, found.tiers, strict=True):
            name = read.names[len(read.slots)]
            assert name in self.by_name, f"{name} is found, and not stored"
            entry = self.by_name[name]
            assert entry.is_ready and entry.slot == slot and self.marks[slot] == name
            assert self.has_tiers or tier == HOST
            if entry.generation is None:
                entry.generation = generation
                self.remember(slot, generation)
            assert entry.generation == generation
            entry.pins += 1
            entry.use = self.tick
            read.slots.append(slot)
        read.num_coming, read.is_asking = found.num_coming, found.is_asking
        assert len(read.slots) + found.num_coming <= len(read.names)

    def remember(self, slot: int, generation: int) -> None:
        assert (slot, generation) not in self.generations, "a generation came back"
        self.generations.add((slot, generation))
        self.history.append((slot, generation))

    def is_quiet(self) -> bool:
        return not self.former

    # --- sessions and processes -----------------------------------------------------------------------------------

    def opened(self, which: int) -> tuple[Worker, str]:
        """Returns a worker and its session, opened if need be."""
        worker = self.workers[which]
        if worker.session is None:
            self.open(which, closes_first=False)
        assert worker.session is not None
        return worker, worker.session

    @rule(which=st.integers(0, WORKERS - 1), closes_first=st.booleans())
    def open(self, which: int, closes_first: bool) -> None:
        worker = self.workers[which]
        if worker.session is not None and closes_first:
            self.close(which)
        name = self.new_name()
        # Hello says that the copies of earlier sessions are over.
        self.settle(worker)
        worker.session = name
        self.former.discard(worker.pid)
        self.store.open_session(name, hello(str(worker.pid), worker.pid), lambda: worker.is_gone)
        assert self.store.take_outgoing()[name] == [StoreWelcome(self.store.epoch, self.num_slots)]
        self.follow()

    @rule(which=st.integers(0, WORKERS - 1))
    def close(self, which: int) -> None:
        worker = self.workers[which]
        if worker.session is not None:
            self.store.close_session(worker.session)
            worker.session = None
        self.follow()

    @rule(which=st.integers(0, WORKERS - 1), happens=SELDOM)
    def exit(self, which: int, happens: bool = True) -> None:
        """The process dies; its copies in flight may still land."""
        if not happens:
            return
        self.close(which)
        self.exiting.append(self.workers[which])
        self.workers[which] = self.new_worker()

    @precondition(lambda self: self.exiting)
    @rule(which=st.integers(0, 9))
    def be_gone(self, which: int) -> None:
        worker = self.exiting.pop(which % len(self.exiting))
        worker.is_gone = True
        self.settle(worker)
        self.former.discard(worker.pid)
        self.store.poll()
        self.follow()

    def settle(self, worker: Worker) -> None:
        """The process has no copies any more, and the store is about to hear of it."""
        for slot, _ in list(worker.writes):
            self.end_write_of(worker, slot)
        for read in worker.reads:
            self.unpin(read)
        worker.reads.clear()

    def end_write_of(self, worker: Worker, slot: int) -> None:
        (pair,) = [p for p in worker.writes if p[0] == slot]
        del worker.writes[pair]
        entry = self.by_slot.get(slot)
        if entry is not None and entry.generation == pair[1] and not entry.is_ready:
            if entry.is_listed:
                del self.by_name[entry.name]
            del self.by_slot[slot]

    def unpin(self, read: Read) -> None:
        for slot in read.slots:
            entry = self.by_slot.get(slot)
            if entry is not None and entry.pins:
                entry.pins -= 1
                if not entry.is_listed:
                    self.drop(entry)

    @rule(happens=SELDOM)
    def restart_store(self, happens: bool) -> None:
        if not happens:
            return
        for worker in self.workers:
            worker.session = None
        copying = [w for w in self.processes() if w.writes or w.reads or w in self.exiting]
        former: dict[int, Callable[[], bool]] = {w.pid: (lambda w=w: w.is_gone) for w in copying}
        disk, self.disk, self.peers = self.disk, FakeSlowTier(2), FakeAskedTier()
        self.disk.pages.update(disk.pages)
        self.start_store(former)

    # --- messages -------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, WORKERS - 1), path=PATHS, first=FIRSTS)
    def put(self, which: int, path: str, first: int) -> None:
        worker, session = self.opened(which)
        self.tick += 1
        self.num_names += 1
        first = min(first, len(path))
        names, parent = prefixes(path, first), path[: first - 1]
        self.store.receive(
            session,
            Put(
                self.num_names,
                namespace_of(path),
                key(parent) if parent else b"",
                tuple(map(key, names)),
                tuple(map(identity, names)),
            ),
        )
        (granted,) = self.store.take_outgoing()[session]
        assert isinstance(granted, PutGranted) and granted.number == self.num_names
        removed = self.removed()
        if parent in self.by_name:
            self.by_name[parent].use = self.tick
        on_tiers = self.has_tiers and (key(parent) in self.disk.pages or self.peers.find(key(parent)) is not None)
        wanted = self.is_quiet() and (not parent or parent in self.by_name or on_tiers)
        # A find may have pinned pages behind one that is still coming.
        reads = [read for w in self.processes() for read in w.reads]
        awaited = {name for read in reads for name in read.names[len(read.slots) :][: read.num_coming]}
        for name, slot, generation in zip(names, granted.slots, granted.generations, strict=True):
            if name in self.by_name:
                assert slot == PRESENT
                self.by_name[name].use = self.tick
                wanted = self.is_quiet()
                continue
            assert slot != PRESENT
            is_free, victims = self.room(namespace_of(name))
            victims = [entry for entry in victims if entry.name != name[:-1]]
            if slot == NO_ROOM:
                assert not wanted or (not is_free and all(victim.name in awaited for victim in victims))
            else:
                assert wanted and (is_free or victims)
            wanted = slot != NO_ROOM
            if slot == NO_ROOM:
                continue
            if not is_free:
                victim = min(victims, key=lambda entry: (entry.use, entry.slot))
                if not self.has_tiers:
                    assert victim.name in removed
                else:
                    victim = next(entry for entry in victims if entry.slot == slot)
                removed.remove(victim.name)
                self.drop(victim)
            assert self.users(slot) == []
            self.remember(slot, generation)
            self.add(Entry(name, slot, generation, False, self.tick))
            worker.writes[slot, generation] = (name, session)
        assert removed == set()
        self.follow()

    @rule(which=st.integers(0, WORKERS - 1), path=PATHS)
    def store_path(self, which: int, path: str) -> None:
        worker, session = self.opened(which)
        self.put(which, path, 1)
        self.end_writes(worker, [pair for pair, (_, writer) in worker.writes.items() if writer == session], (), False)

    @rule(which=st.integers(0, WORKERS - 1), number=st.integers(0, 9), gives_up=st.booleans())
    def finish_write(self, which: int, number: int, gives_up: bool) -> None:
        worker = self.workers[which]
        mine = [pair for pair, (_, session) in worker.writes.items() if session == worker.session]
        if mine:
            self.end_writes(worker, [mine[number % len(mine)]], (), gives_up)

    @rule(which=st.integers(0, WORKERS - 1), number=st.integers(0, 99), gives_up=st.booleans())
    def repeat(self, which: int, number: int, gives_up: bool) -> None:
        """Repeats an old message, which must have no effect: rather of a slot that is being written again."""
        worker, session = self.opened(which)
        mine = [pair for pair, (_, writer) in worker.writes.items() if writer == session]
        old = [pair for pair in self.history if pair not in mine and pair[0] < self.num_slots]
        again = [pair for pair in old if pair[0] in {slot for slot, _ in mine}] or old
        self.end_writes(worker, (), again[number % len(again) :][:1] if again else (), gives_up)

    def end_writes(
        self, worker: Worker, pairs: Sequence[tuple[int, int]], stale: Sequence[tuple[int, int]], gives_up: bool
    ) -> None:
        assert worker.session is not None
        slots, generations = tuple(p[0] for p in [*pairs, *stale]), tuple(p[1] for p in [*pairs, *stale])
        self.tick += 1
        for slot, _ in pairs:
            entry = self.by_slot[slot]
            if gives_up:
                self.end_write_of(worker, slot)
                continue
            self.marks[slot] = entry.name
            del worker.writes[slot, entry.generation or 0]
            entry.is_ready = True
            if not entry.is_listed:
                self.drop(entry)
        self.store.receive(worker.session, GaveUp(slots, generations) if gives_up else Wrote(slots, generations))
        self.follow()

    @rule(which=st.integers(0, WORKERS - 1), path=PATHS, first=FIRSTS, known=st.integers(0, 99))
    def find(self, which: int, path: str, first: int, known: int) -> None:
        """Finds any page, or rather one that is stored or on a slower tier."""
        worker, session = self.opened(which)
        below = [NAME_OF_KEY[each] for tier in (self.disk, self.peers) for each in tier.pages]
        if (names := sorted({*self.by_name, *below})) and known % 4:
            path = names[known // 4 % len(names)]
        self.tick += 1
        self.num_names += 1
        names = prefixes(path, min(first, len(path)))
        expected = 0
        while expected < len(names) and names[expected] in self.by_name and self.by_name[names[expected]].is_ready:
            expected += 1
        read = Read(session, self.num_names, names)
        worker.reads.append(read)
        self.store.receive(session, Find(self.num_names, tuple(map(key, names))))
        outgoing = self.store.take_outgoing()
        (found,) = outgoing.pop(session)
        assert isinstance(found, Found) and not outgoing
        self.take_found(session, found)
        assert len(read.slots) == expected
        assert self.has_tiers or (found.num_coming == 0 and not found.is_asking)
        self.follow()

    @rule(which=st.integers(0, WORKERS - 1), number=st.integers(0, 9))
    def end_find(self, which: int, number: int) -> None:
        worker = self.workers[which]
        mine = [read for read in worker.reads if read.session == worker.session]
        if worker.session is None or not mine:
            return
        read = mine[number % len(mine)]
        worker.reads.remove(read)
        self.unpin(read)
        self.tick += 1
        self.store.receive(worker.session, EndFind(read.number))
        self.follow()
        self.tick += 1
        self.store.receive(worker.session, EndFind(read.number))
        self.follow()

    @rule(which=st.integers(0, WORKERS - 1), happens=SELDOM)
    def purge(self, which: int, happens: bool) -> None:
        if not happens:
            return
        _, session = self.opened(which)
        self.tick += 1
        self.store.receive(session, Purge())
        ready = {name for name, entry in self.by_name.items() if entry.is_ready}
        assert self.removed() == ready
        for entry in list(self.by_name.values()):
            self.drop(entry)
        self.follow()
        assert not any(
            read.num_coming or read.is_asking for w in self.workers for read in w.reads if read.session == w.session
        )

    # --- slower tiers ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.disk.reads or self.peers.reads)
    @rule(number=st.integers(0, 99), ok=st.booleans())
    def end_read(self, number: int, ok: bool) -> None:
        tier = self.disk if self.disk.reads and (number % 2 or not self.peers.reads) else self.peers
        slot = list(tier.reads)[number // 2 % len(tier.reads)]
        entry = self.by_slot[slot]
        ok = tier.end_read(slot, ok)
        if ok:
            self.marks[slot] = entry.name
            entry.is_ready = True
        elif entry.is_listed:
            del self.by_name[entry.name]
        if not ok:
            del self.by_slot[slot]
        self.poll()

    @precondition(lambda self: self.disk.writes)
    @rule(number=st.integers(0, 9), ok=st.booleans())
    def end_write(self, number: int, ok: bool) -> None:
        slot = list(self.disk.writes)[number % len(self.disk.writes)]
        assert key(self.marks[slot]) == self.disk.writes[slot].key
        self.disk.end_write(slot, ok)
        entry = self.by_slot[slot]
        if not entry.is_listed:
            self.drop(entry)
        self.poll()

    @rule(is_away=st.booleans())
    def come_or_go(self, is_away: bool) -> None:
        self.peers.is_away = is_away

    @precondition(lambda self: self.peers.questions)
    @rule(number=st.integers(0, 9))
    def answer(self, number: int) -> None:
        self.peers.answer(list(self.peers.questions)[number % len(self.peers.questions)])
        self.poll()

    @rule(path=PATHS)
    def find_for_peer(self, path: str) -> None:
        """The store of another node gets pages, none of which comes from further nodes."""
        peer = self.new_worker()
        peer.session = self.new_name()
        self.exiting.append(peer)
        names = prefixes(path)
        keys = tuple(map(key, names))
        reads = dict(self.peers.reads)
        peer.reads.append(Read(peer.session, 1, names))
        num_found = len(self.store.run_of(keys))
        self.store.open_peer_session(peer.session)
        self.tick += 1
        self.store.receive(peer.session, Find(1, keys))
        self.follow()
        (read,) = peer.reads
        assert not read.is_asking and len(read.slots) + read.num_coming <= len(names)
        assert self.peers.reads == reads
        assert num_found >= len(read.slots)
        self.store.close_session(peer.session)
        self.settle(peer)
        self.exiting.remove(peer)
        self.poll()

    @rule(path=PATHS, happens=SELDOM)
    def forget(self, path: str, happens: bool) -> None:
        if not happens:
            return
        self.disk.remove(key(path))
        self.peers.remove(key(path))

    @rule(seconds=st.sampled_from([0.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.poll()

    def poll(self) -> None:
        self.store.poll()
        self.follow()

    # --- always ---------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 9))
    def copy_late(self, which: int) -> None:
        """Any copy that is not known to be over may write now."""
        writes = [(slot, name) for w in self.processes() for (slot, _), (name, _) in w.writes.items()]
        if writes:
            slot, name = writes[which % len(writes)]
            self.marks[slot] = name

    @invariant()
    def readers_read_their_pages(self) -> None:
        for worker in self.processes() if hasattr(self, "store") else ():
            for read in worker.reads:
                for name, slot in zip(read.names, read.slots, strict=False):
                    assert self.marks[slot] == name, f"a reader of {name} gets {self.marks[slot]}"

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "store"):
            assert self.store.check_integrity() == ""
            stats = self.store.stats()
            assert stats.num_free == self.num_slots - len(self.by_slot)
            num_unready = sum(not entry.is_ready for entry in self.by_slot.values())
            assert stats.num_writing + stats.num_reading == num_unready
            # Pages that slower tiers have read are pinned before the model hears of them.
            assert self.has_tiers or stats.num_pinned == sum(entry.pins > 0 for entry in self.by_slot.values())
            asking = [read for w in self.workers for read in w.reads if read.session == w.session and read.is_asking]
            assert len(self.peers.questions) <= len(asking), "a question without a find"
            # A failed read ends the question behind it. A find that expects earlier pages hears of that with these.
            certain = [read for read in asking if not read.num_coming]
            assert len(self.peers.questions) >= len(certain), "a find without a question"

    def teardown(self) -> None:
        """With every copy over, all slots can be had again."""
        if not hasattr(self, "store"):
            return
        for which in range(WORKERS):
            self.exit(which)
        while self.exiting:
            self.be_gone(0)
        self.store.open_session("last", hello("last", 10**6), lambda: False)
        self.store.receive("last", Purge())
        for tier in (self.disk, self.peers):
            for slot in list(tier.reads):
                tier.end_read(slot)
            for slot in list(tier.writes):
                tier.end_write(slot)
        self.store.poll()
        assert self.store.check_integrity() == ""
        assert self.store.stats().num_free == self.num_slots


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
