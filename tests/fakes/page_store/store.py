"""A store's process: a real PageStore, and a ledger of what its messages have promised."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tandem.pagestore.messages import (
    DISK,
    EndFind,
    Find,
    Found,
    GaveUp,
    Purge,
    Put,
    PutGranted,
    StoreClientMessage,
    StoreHello,
    StoreServerMessage,
    StoreWelcome,
    Wrote,
)
from tandem.pagestore.server.page_store import PageStore
from tests.fakes.page_store.session import END, SentPurge, SimSession

if TYPE_CHECKING:
    from tests.fakes.page_store.worker import SimWorker
    from tests.fakes.page_store.world import World

# Name of a session without a worker.
PROBE = "probe"


class Ledger:
    """Promises of one life of the store, by its messages alone.

    Attributes:
        writers: session, generation and key of each slot granted and not yet given back.
        finds: key of each slot found by (session, number) until the find's end.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._asked: dict[tuple[type, str, int], tuple[bytes, ...]] = {}
        # Puts whose answers, which wait for a purge, grant slots of before a later one.
        self._purged: set[tuple[type, str, int]] = set()
        self._workers: dict[str, SimWorker] = {}
        self.writers: dict[int, tuple[str, int, bytes]] = {}
        self.finds: defaultdict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)

    def opened(self, session: SimSession) -> None:
        """A worker's Hello says that its copies of earlier sessions have ended."""
        for earlier, worker in list(self._workers.items()):
            if worker is session.worker:
                self._forget(earlier)
        self._workers[session.name] = session.worker

    def note_exits(self) -> None:
        for session, worker in list(self._workers.items()):
            if worker.is_gone():
                self._forget(session)

    def received(self, session: str, message: StoreClientMessage) -> None:
        if session not in self._workers:
            return
        if isinstance(message, Put | Find):
            self._asked[type(message), session, message.number] = message.keys
        elif isinstance(message, Wrote | GaveUp):
            for slot, generation in zip(message.slots, message.generations, strict=True):
                if self.writers.get(slot, ())[:2] == (session, generation):
                    del self.writers[slot]
        elif isinstance(message, EndFind):
            self.finds.pop((session, message.number), None)

    def sent(self, session: str, message: StoreServerMessage) -> None:
        if session not in self._workers:
            return
        if isinstance(message, PutGranted):
            asked = Put, session, message.number
            is_purged = asked in self._purged
            for key, slot, generation in zip(self._asked.pop(asked), message.slots, message.generations, strict=True):
                if slot >= 0:
                    self._world.check_untouched(slot, "is granted")
                    assert is_purged or all(key != writer[2] for writer in self.writers.values()), (
                        "a key has two writers"
                    )
                    self.writers[slot] = session, generation, b"" if is_purged else key
        elif isinstance(message, Found):
            keys = self._asked[Find, session, message.number]
            assert message.first + len(message.slots) + message.num_coming <= len(keys), "more is found than asked for"
            for key, slot in zip(keys[message.first :], message.slots, strict=False):
                assert slot not in self.writers, f"slot {slot} is found while it is being written"
                self._world.check_is_stored(slot, key, "is found")
                self.finds[session, message.number][slot] = key
                self._world.counts["found"] += 1

    def users(self, slot: int) -> list[str]:
        found = [f"find {find}" for find, slots in self.finds.items() if slot in slots]
        return found + ([f"writer {self.writers[slot][0]}"] if slot in self.writers else [])

    def purged(self) -> None:
        """Pages being written never become visible, so their keys may have other writers."""
        self.writers = {slot: (session, number, b"") for slot, (session, number, _) in self.writers.items()}
        self._purged |= {asked for asked in self._asked if asked[0] is Put}

    def _forget(self, session: str) -> None:
        del self._workers[session]
        self.writers = {slot: writer for slot, writer in self.writers.items() if writer[0] != session}
        for find in [find for find in self.finds if find[0] == session]:
            del self.finds[find]


class SimStore:
    """One life of the store's process.

    Attributes:
        has_disk: a disk below the memory.
    """

    def __init__(self, world: "World", former: "list[SimWorker]") -> None:
        self.world = world
        self.alive = True
        self.paused = False
        self.ledger = Ledger(world)
        self.disk = world.disk.open(world) if world.disk is not None else None
        self.pages = PageStore(
            world.num_slots,
            world.clock,
            [(DISK, self.disk)] if self.disk is not None else [],
            {worker.pid: worker.is_gone for worker in former},
        )
        self.sessions: dict[str, SimSession] = {}
        self.to_probe: list[StoreServerMessage] = []

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused

    def deliver(self, session: SimSession) -> None:
        """Takes the next message of a session."""
        message: Any = session.up.popleft()
        number = 0
        if isinstance(message, SentPurge):
            number, message = message.number, Purge()
        self.ledger.note_exits()
        if message is END:
            self._close(session)
        elif isinstance(message, StoreHello):
            self._close_earlier(session.worker)
            session.open_at_store = True
            self.sessions[session.name] = session
            self.ledger.opened(session)
            self.pages.open_session(session.name, message, session.worker.is_gone)
        elif session.open_at_store:
            self.ledger.received(session.name, message)
            self.pages.receive(session.name, message)
            if isinstance(message, Purge):
                self.ledger.purged()
                self.world.resets.purged(session.worker, number)
        self.send()

    def poll(self) -> None:
        self.ledger.note_exits()
        self.pages.poll()
        self.send()

    def kill(self, draw: "Any") -> None:
        """Ends the process: transfers with the disk end halfway, and some of its last messages arrive."""
        self.alive = False
        if self.disk is not None:
            self.disk.close()
        for session in self.world.sessions:
            if session.store is self:
                session.open_at_store = False
                session.worker.late += [
                    (session.epoch, message) for message in session.cut(0, draw(2)) if session.epoch
                ]
                session.up.clear()

    def _close_earlier(self, worker: "SimWorker") -> None:
        """The server closes an earlier stream of the same worker when the next one opens."""
        for session in list(self.sessions.values()):
            if session.worker is worker:
                self._close(session)

    def _close(self, session: SimSession) -> None:
        if session.open_at_store:
            session.open_at_store = False
            del self.sessions[session.name]
            self.pages.close_session(session.name)
            session.cut()

    def send(self) -> None:
        for name, messages in self.pages.take_outgoing().items():
            for message in messages:
                if isinstance(message, StoreWelcome):
                    assert message.num_slots == self.world.num_slots and message.epoch == self.pages.epoch
                self.ledger.sent(name, message)
                if name == PROBE:
                    self.to_probe.append(message)
                elif (session := self.sessions.get(name)) is not None and not session.is_cut:
                    session.down.append(message)
