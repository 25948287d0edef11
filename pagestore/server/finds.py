"""Finds: runs of stored pages, from memory and from slower tiers."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.pagestore.messages import HOST, Found
from tandem.pagestore.server.base import EndedTransfer, SlowTier, StoredPage
from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.running_find import RunningFind
from tandem.pagestore.server.slots import PageState, SlotPage
from tandem.pagestore.server.stats import StoreCounts

# Reads in flight together, and how far one find reads ahead of its answers.
MAX_READS = 128
READ_AHEAD = 32
# A find ends if no page arrives for this long.
PATIENCE_S = 10.0


@dataclass(slots=True, eq=False)
class SlowRead:
    """A page being read from a slower tier. Attributes: waiting: finds that expect it, with its index in their keys."""

    page: SlotPage
    tier: int
    waiting: dict[RunningFind, int] = field(default_factory=dict)


class Finds:
    """Answers finds. Each page is read once, whoever waits for it; a find that cannot get a slot ends there."""

    def __init__(
        self,
        memory: PageMemory,
        tiers: Sequence[tuple[int, SlowTier]],
        clock: Callable[[], float],
        counts: StoreCounts,
        answer: Callable[[str, Found], None],
        on_read: Callable[[SlotPage], None],
    ) -> None:
        """
        Args:
            tiers: with their numbers in Found.tiers, in the order of preference.
            answer: sends a message to a session.
            on_read: called with each page that became ready by a read.
        """
        self._memory = memory
        self._tiers = tiers
        self._clock = clock
        self._counts = counts
        self._answer = answer
        self._on_read = on_read
        self._reads: dict[int, SlowRead] = {}
        # Finds that wait for other reads to end, in order.
        self._queue: OrderedDict[RunningFind, None] = OrderedDict()
        # Finds that expect pages, by deadline.
        self._waiting: OrderedDict[RunningFind, None] = OrderedDict()

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self, session: str, number: int, keys: tuple[bytes, ...], is_quiet: bool) -> RunningFind:
        """Answers with the pages in memory and begins to read others. Finds nothing unless the store is quiet."""
        find = RunningFind(session, number, keys, self._end_of_run(keys) if is_quiet else 0)
        self._counts.keys_sought += len(keys)
        self._counts.keys_missed += len(keys) - find.end
        self._advance(find, is_first=True)
        return find

    def stop(self, find: RunningFind, keep_pins: bool) -> None:
        """Cancels what is coming. Answered pages stay pinned for readers that may still copy (`keep_pins`)."""
        self._truncate(find, find.next)
        self._waiting.pop(find, None)
        if not keep_pins:
            self.unpin(find)

    def unpin(self, find: RunningFind) -> None:
        """Unpins the answered pages."""
        for page in find.pages:
            self._memory.unpin(page)
        find.pages.clear()

    def on_purge(self) -> None:
        """Ends finds that expect pages. Reads in flight keep their slots until they end."""
        for find in list(self._waiting):
            self._end_at(find, find.next)

    def on_ended_read(self, transfer: EndedTransfer) -> bool:
        """Takes the end of a read. Returns False if the slot is not being read."""
        read = self._reads.pop(transfer.slot, None)
        if read is None:
            return False
        self._counts.failed_reads += not transfer.ok
        if transfer.ok:
            is_ready = self._memory.make_ready(read.page)
        else:
            is_ready = False
            self._memory.discard(read.page)
        for find, index in read.waiting.items():
            del find.coming[index]
            if is_ready:
                self._memory.pin(read.page)
                find.arrived[index] = (read.page, read.tier)
        if is_ready:
            self._on_read(read.page)
        for find, index in list(read.waiting.items()):
            if is_ready:
                self._advance(find)
            else:
                self._end_at(find, index)
        return True

    def poll(self) -> None:
        """Starts reads that waited for others, and ends finds that waited too long."""
        while self._queue and len(self._reads) < MAX_READS:
            find, _ = self._queue.popitem(last=False)
            self._advance(find)
        while self._waiting and (find := next(iter(self._waiting))).deadline <= self._clock():
            self._end_at(find, find.next)

    # --- one find -----------------------------------------------------------------------------------------------

    def _end_of_run(self, keys: tuple[bytes, ...]) -> int:
        for index, key in enumerate(keys):
            page = self._memory.page(key)
            if page is None:
                if self._holder(key) is None:
                    return index
            elif page.state is PageState.WRITING:
                return index
        return len(keys)

    def _holder(self, key: bytes) -> tuple[int, SlowTier, StoredPage] | None:
        for number, tier in self._tiers:
            stored = tier.find(key)
            if stored is not None:
                return number, tier, stored
        return None

    def _advance(self, find: RunningFind, is_first: bool = False) -> None:
        """Answers the pages that continue the run, and reads ahead."""
        first, tiers = find.next, []
        while find.next < find.end:
            arrived = find.arrived.pop(find.next, None)
            if arrived is None and find.ahead == find.next:
                arrived = self._pin_ready(find.keys[find.next])
                find.ahead += arrived is not None
            if arrived is None:
                break
            page, tier = arrived
            find.pages.append(page)
            tiers.append(tier)
            self._counts.count_hit(tier)
            find.next += 1
        self._read_ahead(find)
        if is_first or tiers or not find.is_waiting:
            self._send(find, first, tiers)

    def _end_at(self, find: RunningFind, end: int) -> None:
        """Ends the run before a page that will not come."""
        was_waiting = find.is_waiting
        self._truncate(find, end)
        if was_waiting and not find.is_waiting:
            self._send(find, find.next, [])

    def _send(self, find: RunningFind, first: int, tiers: list[int]) -> None:
        pages = find.pages[first : find.next]
        self._answer(
            find.session,
            Found(
                find.number,
                first,
                tuple(page.slot for page in pages),
                tuple(page.generation for page in pages),
                tuple(tiers),
                find.end - find.next,
            ),
        )
        self._waiting.pop(find, None)
        if find.is_waiting:
            find.deadline = self._clock() + PATIENCE_S
            self._waiting[find] = None

    def _pin_ready(self, key: bytes) -> tuple[SlotPage, int] | None:
        page = self._memory.page(key)
        if page is None or page.state is not PageState.READY:
            return None
        self._memory.use(page)
        self._memory.pin(page)
        return page, HOST

    def _read_ahead(self, find: RunningFind) -> None:
        while find.ahead < min(find.end, find.next + READ_AHEAD):
            key = find.keys[find.ahead]
            page = self._memory.page(key)
            if page is None:
                if len(self._reads) >= MAX_READS:
                    self._queue[find] = None
                    return
                page = self._start_read(key)
            if page is None or page.state is PageState.WRITING:
                self._truncate(find, find.ahead)
                return
            if page.state is PageState.READY:
                self._memory.use(page)
                self._memory.pin(page)
                find.arrived[find.ahead] = (page, HOST)
            else:
                self._reads[page.slot].waiting[find] = find.ahead
                find.coming[find.ahead] = page
            find.ahead += 1

    def _start_read(self, key: bytes) -> SlotPage | None:
        holder = self._holder(key)
        page = None if holder is None else self._memory.allocate(holder[2], PageState.READING)
        if holder is None or page is None:
            return None
        number, tier, stored = holder
        self._reads[page.slot] = SlowRead(page, number)
        tier.read(stored, page.slot)
        return page

    def _truncate(self, find: RunningFind, end: int) -> None:
        """Expects no page from `end` on."""
        find.end = min(find.end, end)
        for index in [index for index in find.coming if index >= end]:
            del self._reads[find.coming.pop(index).slot].waiting[find]
        for index in [index for index in find.arrived if index >= end]:
            self._memory.unpin(find.arrived.pop(index)[0])
        find.ahead = min(find.ahead, find.end)
        if find.ahead == find.end:
            self._queue.pop(find, None)

    # --- integrity ----------------------------------------------------------------------------------------------

    def slots_being_read(self) -> Iterator[int]:
        return iter(self._reads)

    def check_integrity(self, finds: Sequence[RunningFind]) -> str:
        """Compares reads, waiting finds and all running finds; "" or the first violation."""
        for slot, read in self._reads.items():
            if read.page.slot != slot or read.page.state is not PageState.READING:
                return f"slot {slot} is read into, but {read.page.state.value}"
            for find, index in read.waiting.items():
                if find.coming.get(index) is not read.page:
                    return f"find {find.number} of {find.session} does not expect slot {slot}"
        if {find for find in finds if find.is_waiting} != set(self._waiting) or not set(self._queue) <= set(
            self._waiting
        ):
            return f"{len(self._waiting)} finds wait, but others expect pages"
        for find in finds:
            if not find.next <= find.ahead <= find.end or set(range(find.next, find.ahead)) != {
                *find.coming,
                *find.arrived,
            }:
                return f"find {find.number} of {find.session} has lost a page"
            if len(find.pages) not in (find.next, 0):
                return f"find {find.number} of {find.session} pins {len(find.pages)} of {find.next} pages"
            if find.ahead < find.end and not find.coming and not find.arrived and find not in self._queue:
                return f"find {find.number} of {find.session} waits for nothing"
        return ""
