"""Faults to plant in the parts of the page store, each a bug that such a tier could have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pytest import MonkeyPatch

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.launch_list import LaunchList
from tandem.pagestore.client import node_keys
from tandem.pagestore.client.events import FromStore, StoreClosed
from tandem.pagestore.client.load_copies import LoadCopies
from tandem.pagestore.client.loading import PageLoader
from tandem.pagestore.client.prefetch import Prefetch
from tandem.pagestore.client.tier import StoreTier
from tandem.pagestore.client.writing import PageWriter
from tandem.pagestore.keys import root_key
from tandem.pagestore.messages import EndFind, GaveUp, Put, Wrote
from tandem.pagestore.server.base import EndedTransfer
from tandem.pagestore.server.disk.page_index import Place, Segment
from tandem.pagestore.server.disk.page_io import PageIo
from tandem.pagestore.server.disk.transfers import Transfer
from tandem.pagestore.server.finds import Finds
from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.running_find import RunningFind
from tandem.pagestore.server.sessions import Session
from tandem.pagestore.server.slots import READY, UNLISTED
from tandem.pagestore.server.write_behind import WriteBehind
from tandem.worker.events import Event


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        plant: patches the parts.
        message: part of the violation that a schedule must end with.
        first: number of the first schedule to try.
        on_disk: schedules have a real disk tier, on a folder.
    """

    plant: Callable[[MonkeyPatch], None]
    message: str
    first: int = 0
    on_disk: bool = False


# --- the store ---


def slots_visible_at_grant(patch: MonkeyPatch) -> None:
    original = PageStore._put

    def put(self: PageStore, session: Session, message: Put) -> None:
        original(self, session, message)
        for slot in session.writing:
            self._memory.states[slot] = READY

    patch.setattr(PageStore, "_put", put)


def slots_freed_at_their_writers_stream_end(patch: MonkeyPatch) -> None:
    original = PageStore.close_session

    def close(self: PageStore, name: str) -> None:
        writing = self._sessions.get(name).writing
        for slot in writing:
            self._memory.discard(slot)
        writing.clear()
        original(self, name)

    patch.setattr(PageStore, "close_session", close)


def slots_unpinned_at_their_readers_stream_end(patch: MonkeyPatch) -> None:
    original = Finds.stop
    patch.setattr(Finds, "stop", lambda self, find, keep_pins: original(self, find, keep_pins=False))


def generations_not_compared(patch: MonkeyPatch) -> None:
    """A message that comes twice ends the slot's next writing."""

    def take_written(self: PageStore, session: Session, message: Wrote | GaveUp) -> list[int]:
        return [slot for slot in message.slots if session.writing.pop(slot, None) is not None]

    patch.setattr(PageStore, "_take_written", take_written)


def slots_granted_before_former_users_are_quiet(patch: MonkeyPatch) -> None:
    patch.setattr(PageStore, "_is_quiet", True)


def purges_that_leave_pages_being_written(patch: MonkeyPatch) -> None:
    """Neither end remembers that a page being written must not become visible."""
    original = PageMemory.make_ready
    original_reset = PageWriter.reset

    def make_ready(self: PageMemory, slot: int) -> bool:
        if not self.is_listed(slot) and self.slot(self.page(slot).key) is None:
            self.states[slot] &= ~UNLISTED
            self._index.add(self.page(slot).key, slot)
        return original(self, slot)

    def reset(self: PageWriter) -> None:
        writes, self._writes = self._writes, []
        original_reset(self)
        self._writes = writes

    patch.setattr(PageMemory, "make_ready", make_ready)
    patch.setattr(PageWriter, "reset", reset)


def purges_that_leave_the_disk(patch: MonkeyPatch) -> None:
    original = PageStore.purge

    def purge(self: PageStore) -> None:
        tiers, self._tiers = self._tiers, ()
        original(self)
        self._tiers = tiers

    patch.setattr(PageStore, "purge", purge)


def failed_purges_reported_as_done(patch: MonkeyPatch) -> None:
    patch.setattr(PageStore, "purge_failure", "")


def failed_reads_taken_for_pages(patch: MonkeyPatch) -> None:
    original = Finds.on_ended_read

    def on_ended_read(self: Finds, transfer: EndedTransfer) -> bool:
        return original(self, transfer._replace(ok=True))

    patch.setattr(Finds, "on_ended_read", on_ended_read)


def slots_freed_while_the_disk_reads_into_them(patch: MonkeyPatch) -> None:
    """A find that ends takes the slots with it that are still to be filled."""
    original = Finds._truncate
    original_ended = WriteBehind.on_ended_write

    def truncate(self: Finds, find: RunningFind, end: int) -> None:
        coming = [slot for index, slot in find.coming.items() if index >= end]
        original(self, find, end)
        for slot in coming:
            if slot in self._reads and not self._reads[slot].waiting:
                del self._reads[slot]
                self._memory.discard(slot)

    def on_ended_write(self: WriteBehind, transfer: EndedTransfer) -> bool:
        return original_ended(self, transfer) or True

    patch.setattr(Finds, "_truncate", truncate)
    patch.setattr(WriteBehind, "on_ended_write", on_ended_write)


def pages_evicted_while_written_to_disk(patch: MonkeyPatch) -> None:
    original = WriteBehind.start

    def start(self: WriteBehind) -> None:
        before = set(self._writing)
        original(self)
        self._memory.unpin(self._writing - before)

    def ended(self: WriteBehind, transfer: EndedTransfer) -> bool:
        is_known = transfer.slot in self._writing
        self._writing.discard(transfer.slot)
        return is_known

    patch.setattr(WriteBehind, "start", start)
    patch.setattr(WriteBehind, "on_ended_write", ended)


def disk_reads_not_verified(patch: MonkeyPatch) -> None:
    original = PageIo.read

    def read(self: PageIo, segment: Segment, place: Place, reads: Sequence[Transfer]) -> list[bool]:
        return [True] * len(original(self, segment, place, reads))

    patch.setattr(PageIo, "read", read)


# --- the workers' parts ---


def pages_let_go_during_their_copy(patch: MonkeyPatch) -> None:
    patch.setattr(CacheManager, "hold_page", lambda self, node: None)
    patch.setattr(CacheManager, "let_go_page", lambda self, page_id: None)


def epochs_not_compared(patch: MonkeyPatch) -> None:
    original = StoreTier.receive

    def receive(self: StoreTier, event: Event) -> None:
        if isinstance(event, FromStore) and self._epoch is not None:
            event = replace(event, epoch=self._epoch)
        original(self, event)

    patch.setattr(StoreTier, "receive", receive)


def sessions_declared_quiet_at_once(patch: MonkeyPatch) -> None:
    original = StoreTier.receive

    def receive(self: StoreTier, event: Event) -> None:
        if isinstance(event, StoreClosed):
            event.when_quiet()
            event = replace(event, when_quiet=lambda: None)
        original(self, event)

    patch.setattr(StoreTier, "receive", receive)


def pages_entered_before_their_copy_ends(patch: MonkeyPatch) -> None:
    original = LoadCopies.start
    original_release = CacheManager.release_pages
    entered: set[int] = set()

    def start(self: LoadCopies, prefetch: Prefetch, now: float) -> bool:
        num_before = len(prefetch.loads)
        result = original(self, prefetch, now)
        for load in list(prefetch.loads)[num_before:]:
            page_ids = load.handle.page_ids
            self._enter(prefetch, load, 0)
            load.handle.page_ids, load.may_enter = page_ids, False
            entered.add(id(load.handle))
        return result

    def release(self: CacheManager, handle: PageHandle, after: Sequence[Completion] = ()) -> None:
        if id(handle) in entered:
            entered.remove(id(handle))
        else:
            original_release(self, handle, after)

    patch.setattr(LoadCopies, "start", start)
    patch.setattr(CacheManager, "release_pages", release)


def loads_freed_with_their_epoch(patch: MonkeyPatch) -> None:
    original = PageLoader.close

    def close(self: PageLoader) -> None:
        original(self)
        for load in [load for prefetch in self._copies._loading for load in prefetch.loads]:
            self._cache.release_pages(load.handle)
            empty = self._cache.acquire_pages([], 0, max_cached_len=0)
            assert empty is not None
            load.handle = empty

    patch.setattr(PageLoader, "close", close)


def keys_without_namespace(patch: MonkeyPatch) -> None:
    patch.setattr(node_keys, "root_key", lambda page_format, namespace, adapter="": root_key(page_format, ""))


def pages_stored_before_they_are_computed(patch: MonkeyPatch) -> None:
    patch.setattr(LaunchList, "num_ready", lambda self, page_ids: len(page_ids))


def pages_reported_before_their_copy_ends(patch: MonkeyPatch) -> None:
    original = PageWriter._start_copies

    def start(self: PageWriter) -> None:
        before = list(self._writes)
        original(self)
        for write in self._writes:
            if write not in before and write.message is not None:
                self._send(write.message)
                write.message = None

    patch.setattr(PageWriter, "_start_copies", start)


def finds_ended_while_copies_run(patch: MonkeyPatch) -> None:
    def end_find(self: PageLoader, prefetch: Prefetch) -> None:
        if prefetch.find is not None:
            self._send(EndFind(prefetch.find))
            self._forget_find(prefetch)

    patch.setattr(PageLoader, "_end_find", end_find)


def growth_that_gives_back_at_once(patch: MonkeyPatch) -> None:
    patch.setattr(StoreTier, "yields_pages", lambda self: False)


def growth_that_waits_for_ever(patch: MonkeyPatch) -> None:
    patch.setattr(StoreTier, "yields_pages", lambda self: True)


def loads_that_outlive_a_reset(patch: MonkeyPatch) -> None:
    patch.setattr(PageLoader, "reset", lambda self: None)


def pages_loaded_from_their_neighbours_slots(patch: MonkeyPatch) -> None:
    original = LoadCopies.start

    def start(self: LoadCopies, prefetch: Prefetch, now: float) -> bool:
        slots, prefetch.slots = prefetch.slots, prefetch.slots[1:] + prefetch.slots[:1]
        result = original(self, prefetch, now)
        prefetch.slots = slots
        return result

    patch.setattr(LoadCopies, "start", start)


FAULTS: dict[str, Fault] = {
    "slots visible at grant": Fault(slots_visible_at_grant, "is found while it is being written"),
    "slots freed at their writer's stream end": Fault(
        slots_freed_at_their_writers_stream_end, "is granted, but belongs"
    ),
    "slots unpinned at their reader's stream end": Fault(
        slots_unpinned_at_their_readers_stream_end, "is granted, but", first=25
    ),
    "generations not compared": Fault(generations_not_compared, "is granted, but", first=40),
    "slots granted before former users are quiet": Fault(
        slots_granted_before_former_users_are_quiet, "is granted", first=20
    ),
    "purges that leave pages being written": Fault(purges_that_leave_pages_being_written, "before reset"),
    "purges that leave the disk": Fault(purges_that_leave_the_disk, "before reset"),
    "failed purges reported as done": Fault(failed_purges_reported_as_done, "before reset", first=280),
    "failed reads taken for pages": Fault(failed_reads_taken_for_pages, "another content", first=14),
    "slots freed while the disk reads into them": Fault(
        slots_freed_while_the_disk_reads_into_them, "the disk uses it", first=236
    ),
    "pages evicted while written to disk": Fault(pages_evicted_while_written_to_disk, "the disk uses it"),
    "disk reads not verified": Fault(disk_reads_not_verified, "another content than its key's", first=24, on_disk=True),
    "pages let go during their copy": Fault(pages_let_go_during_their_copy, "stores another content than the key's"),
    "epochs not compared": Fault(epochs_not_compared, "given back, but not granted", first=110),
    "sessions declared quiet at once": Fault(sessions_declared_quiet_at_once, "in a session that is quiet"),
    "pages entered before their copy ends": Fault(pages_entered_before_their_copy_ends, "holds other tokens"),
    "loads freed with their epoch": Fault(loads_freed_with_their_epoch, "is freed while it is being copied", first=10),
    "keys without namespace": Fault(keys_without_namespace, "content than the key's"),
    "pages stored before they are computed": Fault(
        pages_stored_before_they_are_computed, "stores another content than the key's"
    ),
    "pages reported before their copy ends": Fault(pages_reported_before_their_copy_ends, "while being written"),
    "finds ended while copies run": Fault(finds_ended_while_copies_run, "while being read", first=22),
    "growth that gives back at once": Fault(
        growth_that_gives_back_at_once, "gives back while copies hold pages", first=17
    ),
    "growth that waits for ever": Fault(growth_that_waits_for_ever, "no progress"),
    "loads that outlive a reset": Fault(loads_that_outlive_a_reset, "reset"),
    "pages loaded from their neighbours' slots": Fault(pages_loaded_from_their_neighbours_slots, "holds other tokens"),
}
