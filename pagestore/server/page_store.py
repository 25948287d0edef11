"""The page store's decisions: which page lies in which slot, and who may use it.

Synchronous, without I/O: the server calls `receive` and `poll`, then sends `take_outgoing`. No call takes longer than
O(pages of the message), save `check_integrity` and the exit of a worker. `Purge` fills a few bytes a slot.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tandem.page_changes import PageChanges
from tandem.pagestore.keys import KEY_BYTES
from tandem.pagestore.messages import (
    DISK,
    HOST,
    NO_ROOM,
    PRESENT,
    EndFind,
    Find,
    GaveUp,
    Purge,
    Purged,
    Put,
    PutGranted,
    StoreClientMessage,
    StoreHello,
    StoreServerMessage,
    StoreWelcome,
    Wrote,
)
from tandem.pagestore.server.base import SlowTier, StoredPage
from tandem.pagestore.server.finds import Finds
from tandem.pagestore.server.integrity import check_owners
from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.sessions import Session, Sessions
from tandem.pagestore.server.slots import WRITING
from tandem.pagestore.server.stats import StoreCounts, StoreStats
from tandem.pagestore.server.write_behind import WriteBehind
from tandem.prefix import IDENTITY_BYTES


class PageStore:
    """Grants slots to writers, pins pages for readers, evicts.

    A slot is reused only when no copy can touch it: its writer or readers have said so, or have exited.

    Attributes:
        epoch: random name of this life of the store.
    """

    def __init__(
        self,
        num_slots: int,
        clock: Callable[[], float],
        tiers: Sequence[tuple[int, SlowTier]] = (),
        former_users: Mapping[int, Callable[[], bool]] | None = None,
        max_namespace_share: float = 1.0,
    ) -> None:
        """
        Args:
            clock: monotonic time, in seconds.
            tiers: slower tiers with their numbers in Found.tiers, in the order of preference.
            former_users: processes that may still copy for the store's last life, by pid; the callable tells whether
                the process has exited, and settled. Nothing is granted or found until each has said Hello or is gone.
            max_namespace_share: as for PageMemory.
        """
        self.epoch = secrets.token_hex(16)
        self._former_users = dict(former_users or {})
        self._tiers = tuple(tiers)
        self._memory = PageMemory(num_slots, max_namespace_share)
        self._sessions = Sessions()
        self._counts = StoreCounts()
        self._outgoing: dict[str, list[StoreServerMessage]] = {}
        # Number of the last Purge of each session that waits for Purged: of this purge, or of a later one that lasts.
        self._purging: dict[str, int] = {}
        self._write_behind = [WriteBehind(self._memory, tier) for number, tier in tiers if number == DISK]
        self._finds = Finds(self._memory, self._tiers, clock, self._counts, self._send, self._on_ready)

    # --- sessions -----------------------------------------------------------------------------------------------

    def open_peer_session(self, session: str) -> None:
        """Begins a session for the store of another node, which may only find pages.

        Its finds read from the disk, and from no other node. Pages are unpinned at once when it is closed.
        """
        self._sessions.open(session, session, lambda: True).for_peer = True

    def run_of(self, keys: Sequence[bytes]) -> list[StoredPage]:
        """Returns the pages that the session of another node's store would find."""
        return self._finds.run_of(keys) if self._is_quiet else []

    def check_attempt(self, hello: StoreHello) -> None:
        """Raises ValueError: the worker has opened a session since it sent this, and its copies may run."""
        last = self._sessions.last_attempt(hello.incarnation)
        if hello.attempt < last:
            raise ValueError(f"attempt {hello.attempt} to open a session comes after attempt {last}")

    def open_session(self, session: str, hello: StoreHello, is_gone: Callable[[], bool]) -> None:
        """Begins a session and ends the earlier ones of the same incarnation, whose copies are over.

        Args:
            session: unused name.
            is_gone: whether all processes of the worker have exited, and settled.

        Raises:
            ValueError: the name is in use, or as for `check_attempt`.
        """
        self.check_attempt(hello)
        self._sessions.open(session, hello.incarnation, is_gone, hello.attempt)
        for name in self._sessions.names_of(hello.incarnation):
            if name != session:
                self.close_session(name)
        for settled in self._sessions.take_closed(hello.incarnation):
            self._free_all(settled)
        for pid in (hello.pid, *hello.follower_pids):
            self._former_users.pop(pid, None)
        self._send(session, StoreWelcome(self.epoch, len(self._memory)))

    def close_session(self, session: str) -> None:
        """Ends a session. Its slots and pins stay until the worker's copies are over. Ignores unknown names."""
        closed = self._sessions.close(session)
        if closed is not None:
            self._outgoing.pop(session, None)
            self._purging.pop(session, None)
            for find in closed.finds.values():
                self._finds.stop(find, keep_pins=True)

    def receive(self, session: str, message: StoreClientMessage) -> None:
        """Handles a message.

        Raises:
            ValueError: the session is not open, or the message violates the protocol. Nothing has changed.
        """
        sender = self._sessions.get(session)
        self._memory.next_tick()
        match message:
            case Put():
                self._put(sender, message)
            case Wrote():
                for slot in self._take_written(sender, message):
                    if self._memory.make_ready(slot):
                        self._counts.pages_written += 1
                        self._on_ready(slot)
                self._start_writes()
            case GaveUp():
                for slot in self._take_written(sender, message):
                    self._memory.discard(slot)
            case Find():
                if message.number in sender.finds:
                    raise ValueError(f"find {message.number} is running already")
                _check_keys(message.keys)
                sender.finds[message.number] = self._finds.start(
                    session, message.number, message.keys, self._is_quiet, sender.for_peer
                )
            case EndFind():
                find = sender.finds.pop(message.number, None)
                if find is not None:
                    self._finds.stop(find, keep_pins=False)
            case Purge():
                self.purge()
                if message.number:
                    self._purging[session] = message.number
                    self._tell_purged()
            case StoreHello():
                raise ValueError("StoreHello within a session")

    def poll(self) -> None:
        """Notices exits, ended transfers and passed deadlines, and starts transfers."""
        self._memory.tidy()
        if self._former_users:
            self._former_users = {pid: is_gone for pid, is_gone in self._former_users.items() if not is_gone()}
        for settled in self._sessions.take_settled():
            self._free_all(settled)
        for _, tier in self._tiers:
            for transfer in tier.take_ended():
                is_known = self._finds.on_ended_read(transfer) or any(
                    writes.on_ended_write(transfer) for writes in self._write_behind
                )
                if not is_known:
                    raise RuntimeError(f"a tier ended a transfer of slot {transfer.slot}, which it does not own")
        self._finds.poll()
        self._start_writes()
        self._tell_purged()

    def take_outgoing(self) -> dict[str, list[StoreServerMessage]]:
        """Returns the messages to send since the last call, by session, in order."""
        outgoing, self._outgoing = self._outgoing, {}
        return outgoing

    @property
    def is_purging(self) -> bool:
        return any(tier.is_purging for _, tier in self._tiers)

    @property
    def purge_failure(self) -> str:
        """As SlowTier.purge_failure, of all tiers."""
        return next((tier.purge_failure for _, tier in self._tiers if tier.purge_failure), "")

    def take_changes(self) -> Mapping[int, PageChanges]:
        """Returns the changes of each tier since the last call; tiers without changes are absent."""
        changes = {HOST: self._memory.changes.take()}
        for number, tier in self._tiers:
            stored, removed = tier.take_changes()
            changes[number] = PageChanges(tuple(stored), tuple(removed))
        return {number: change for number, change in changes.items() if change.stored or change.removed}

    # --- messages -----------------------------------------------------------------------------------------------

    @property
    def _is_quiet(self) -> bool:
        return not self._former_users

    def _put(self, session: Session, put: Put) -> None:
        _check_keys(put.keys)
        if len(put.keys) != len(put.identities):
            raise ValueError(f"Put of {len(put.keys)} keys with {len(put.identities)} identities")
        _check_lengths("identity", put.identities, IDENTITY_BYTES)
        if put.parent:
            _check_keys((put.parent,))
        memory, writing, is_quiet = self._memory, session.writing, self._is_quiet
        slots, generations = [], []
        parent = put.parent
        # A page behind a gap could not be found.
        is_wanted = is_quiet and (not parent or self._is_stored(parent))
        for key, identity in zip(put.keys, put.identities, strict=True):
            slot = memory.slot(key)
            generation = 0
            if slot is not None:
                memory.use(slot)
                slots.append(PRESENT)
            elif is_wanted and ((slot := memory.allocate((key, parent, identity, put.namespace), WRITING)) is not None):
                generation = writing[slot] = memory.generations[slot]
                slots.append(slot)
            else:
                slots.append(NO_ROOM)
            generations.append(generation)
            is_wanted = is_quiet and slot is not None
            parent = key
        num_present, num_refused = slots.count(PRESENT), slots.count(NO_ROOM)
        self._counts.pages_present += num_present
        self._counts.pages_refused += num_refused
        self._counts.pages_granted += len(slots) - num_present - num_refused
        self._send(session.name, PutGranted(put.number, tuple(slots), tuple(generations)))

    def _is_stored(self, key: bytes) -> bool:
        slot = self._memory.slot(key)
        if slot is not None:
            self._memory.use(slot)
            return True
        return any(tier.find(key) is not None for _, tier in self._tiers)

    def _take_written(self, session: Session, message: Wrote | GaveUp) -> list[int]:
        """Returns the slots that the session was writing with these generations, and no longer is."""
        if len(message.slots) != len(message.generations):
            raise ValueError(f"{len(message.slots)} slots with {len(message.generations)} generations")
        slots = []
        for slot, generation in zip(message.slots, message.generations, strict=True):
            if session.writing.get(slot) == generation:
                del session.writing[slot]
                slots.append(slot)
        return slots

    def purge(self) -> None:
        """Removes all pages. Pages being written never become visible."""
        self._memory.next_tick()
        self._counts.purges += 1
        self._memory.purge()
        for writes in self._write_behind:
            writes.on_purge()
        for _, tier in self._tiers:
            tier.purge()
        self._finds.on_purge()

    def _tell_purged(self) -> None:
        if self._purging and not self.is_purging and not self.purge_failure:
            told, self._purging = self._purging, {}
            for session, number in told.items():
                self._send(session, Purged(number))

    def _free_all(self, session: Session) -> None:
        """Frees what a settled session used."""
        for slot in session.writing:
            self._memory.discard(slot)
        for find in session.finds.values():
            self._finds.unpin(find)

    def _on_ready(self, slot: int) -> None:
        for writes in self._write_behind:
            writes.add(slot)

    def _start_writes(self) -> None:
        for writes in self._write_behind:
            writes.start()

    def _send(self, session: str, message: StoreServerMessage) -> None:
        self._outgoing.setdefault(session, []).append(message)

    # --- state --------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        num_writing = sum(len(session.writing) for session in self._sessions)
        num_used = len(self._memory) - self._memory.num_free
        return StoreStats(
            is_quiet=self._is_quiet,
            num_slots=len(self._memory),
            num_free=self._memory.num_free,
            num_writing=num_writing,
            num_reading=self._finds.num_reads,
            num_ready=num_used - num_writing - self._finds.num_reads,
            num_pinned=self._memory.num_pinned,
            num_sessions=self._sessions.num_open,
            num_closed=self._sessions.num_closed,
            num_finds=sum(len(session.finds) for session in self._sessions),
            num_waiting=self._finds.num_waiting,
            num_queued=sum(writes.num_queued for writes in self._write_behind),
            num_written_behind=sum(writes.num_writing for writes in self._write_behind),
            num_evictions=self._memory.num_evictions,
            failed_writes=sum(writes.num_failed for writes in self._write_behind),
            counts=replace(self._counts, hits=dict(self._counts.hits)),
        )

    def check_integrity(self) -> str:
        """Recounts every slot's owner; "" or the first violation. O(slots)."""
        return self._memory.check_integrity() or check_owners(
            self._memory, list(self._sessions), self._finds, self._write_behind
        )


def _check_keys(keys: Sequence[bytes]) -> None:
    _check_lengths("key", keys, KEY_BYTES)
    if len(set(keys)) != len(keys):
        raise ValueError("a key twice in one message")


def _check_lengths(name: str, values: Sequence[bytes], num_bytes: int) -> None:
    for length in set(map(len, values)):
        if length != num_bytes:
            raise ValueError(f"{name} of {length} bytes, not {num_bytes}")
