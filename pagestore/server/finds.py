"""Finds: runs of stored pages, from memory and from slower tiers."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from tandem.pagestore.messages import HOST, Found
from tandem.pagestore.server.base import AskedTier, EndedTransfer, SlowTier, StoredPage
from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.running_find import RunningFind
from tandem.pagestore.server.slots import READING, READY, WRITING
from tandem.pagestore.server.stats import StoreCounts

# Reads in flight together, and how far one find reads ahead of its answers.
MAX_READS = 128
READ_AHEAD = 32
# A find ends if no page arrives for this long.
PATIENCE_S = 10.0


@dataclass(slots=True, eq=False)
class SlowRead:
    """A page being read from a slower tier. Attributes: waiting: finds that expect it, with its index in their keys."""

    tier: int
    waiting: dict[RunningFind, int] = field(default_factory=dict)


class Finds:
    """Answers finds. Each page is read once for all finds that wait. A find that cannot get a slot ends there."""

    def __init__(
        self,
        memory: PageMemory,
        tiers: Sequence[tuple[int, SlowTier]],
        clock: Callable[[], float],
        counts: StoreCounts,
        answer: Callable[[str, Found], None],
        on_read: Callable[[int], None],
    ) -> None:
        """
        Args:
            tiers: with their numbers in Found.tiers, in the order of preference.
            answer: sends a message to a session.
            on_read: called with the slot of each page that became ready by a read.
        """
        self._memory = memory
        self._tiers = tiers
        self._own_tiers = [(number, tier) for number, tier in tiers if not isinstance(tier, AskedTier)]
        self._asked_tiers = [tier for _, tier in tiers if isinstance(tier, AskedTier)]
        self._clock = clock
        self._counts = counts
        self._answer = answer
        self._on_read = on_read
        self._reads: dict[int, SlowRead] = {}
        # Finds that wait for other reads to end, in order.
        self._queue: OrderedDict[RunningFind, None] = OrderedDict()
        # Finds that expect pages, by deadline.
        self._waiting: OrderedDict[RunningFind, None] = OrderedDict()
        # By number of the question.
        self._asking: dict[int, RunningFind] = {}

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def reads(self) -> Mapping[int, SlowRead]:
        """Pages being read, by slot."""
        return self._reads

    @property
    def waiting(self) -> Set[RunningFind]:
        """Finds that expect pages."""
        return self._waiting.keys()

    @property
    def queued(self) -> Set[RunningFind]:
        """Finds that wait for other reads to end."""
        return self._queue.keys()

    def is_asking(self, find: RunningFind) -> bool:
        """Returns whether the answer to the find's question is awaited."""
        return find.question is not None and self._asking.get(find.question) is find

    def start(
        self, session: str, number: int, keys: tuple[bytes, ...], is_quiet: bool, for_peer: bool = False
    ) -> RunningFind:
        """Answers with the pages in memory and begins to read others, and to ask other nodes for those behind.

        Finds nothing unless the store is quiet.
        """
        slots = self._memory.pin_run(keys) if is_quiet else []
        num_found = len(slots)
        find = RunningFind(session, number, keys, num_found, num_found, num_found, slots, for_peer=for_peer)
        if not for_peer:
            self._counts.keys_sought += len(keys)
            if num_found:
                self._counts.count_hits(HOST, num_found)
        if is_quiet and self._tiers:
            self._extend(find)
            self._ask(find)
        if find.question is None:
            self._count_missed(find)
        self._read_ahead(find)
        self._send(find, 0, [HOST] * num_found)
        return find

    def run_of(self, keys: Sequence[bytes]) -> list[StoredPage]:
        """Returns the longest run of pages in memory and in this node's slower tiers."""
        run: list[StoredPage] = []
        for key in keys:
            slot = self._memory.slot(key)
            if slot is None:
                if (holder := self._holder(key, for_peer=True)) is None:
                    break
                run.append(holder[2])
            elif self._memory.states[slot] < READY:
                break
            else:
                run.append(self._memory.page(slot))
        return run

    def stop(self, find: RunningFind, keep_pins: bool) -> None:
        """Cancels what is coming. Answered pages stay pinned for readers that may still copy (`keep_pins`)."""
        self._truncate(find, find.next)
        self._waiting.pop(find, None)
        if not keep_pins:
            self.unpin(find)

    def unpin(self, find: RunningFind) -> None:
        """Unpins the answered pages."""
        self._memory.unpin(find.slots)
        find.slots = []

    def on_purge(self) -> None:
        """Ends finds that expect pages. Reads in flight keep their slots until they end."""
        for find in list(self._waiting):
            self._end_at(find, find.next)

    def on_ended_read(self, transfer: EndedTransfer) -> bool:
        """Takes the end of a read. Returns False if the slot is not being read."""
        slot = transfer.slot
        read = self._reads.pop(slot, None)
        if read is None:
            return False
        self._counts.failed_reads += not transfer.ok
        if transfer.ok:
            is_ready = self._memory.make_ready(slot)
        else:
            is_ready = False
            self._memory.discard(slot)
        for find, index in read.waiting.items():
            del find.coming[index]
            if is_ready:
                self._memory.pin(slot)
                find.arrived[index] = (slot, read.tier)
        if is_ready:
            self._on_read(slot)
        for find, index in list(read.waiting.items()):
            if is_ready:
                self._advance(find)
            else:
                self._end_at(find, index)
        return True

    def poll(self) -> None:
        """Takes answers of other nodes, starts reads that waited for others, and ends finds that waited too long."""
        for tier in self._asked_tiers:
            for question in tier.take_answered():
                self._on_answer(question)
        while self._queue and len(self._reads) < MAX_READS:
            find, _ = self._queue.popitem(last=False)
            self._advance(find)
        while self._waiting and (find := next(iter(self._waiting))).deadline <= self._clock():
            self._end_at(find, find.next)

    # --- one find -----------------------------------------------------------------------------------------------

    def _extend(self, find: RunningFind) -> None:
        """Expects the pages behind the run, up to the first one that nobody holds."""
        while find.end < len(find.keys):
            slot = self._memory.slot(find.keys[find.end])
            if slot is None:
                if self._holder(find.keys[find.end], find.for_peer) is None:
                    return
            elif self._memory.states[slot] == WRITING:
                return
            find.end += 1

    def _ask(self, find: RunningFind) -> None:
        """Asks other nodes for the pages behind the run, unless the next one is being written here."""
        if find.for_peer or find.end == len(find.keys) or self._memory.slot(find.keys[find.end]) is not None:
            return
        for tier in self._asked_tiers:
            find.question = tier.ask(find.keys[find.end :])
            if find.question is not None:
                self._asking[find.question] = find

    def _on_answer(self, question: int) -> None:
        find = self._asking.pop(question, None)
        if find is not None:
            find.question = None
            self._extend(find)
            self._count_missed(find)
            self._advance(find, has_news=True)

    def _count_missed(self, find: RunningFind) -> None:
        if not find.for_peer:
            self._counts.keys_missed += len(find.keys) - find.end

    def _holder(self, key: bytes, for_peer: bool) -> tuple[int, SlowTier, StoredPage] | None:
        for number, tier in self._own_tiers if for_peer else self._tiers:
            stored = tier.find(key)
            if stored is not None:
                return number, tier, stored
        return None

    def _advance(self, find: RunningFind, has_news: bool = False) -> None:
        """Answers the pages that continue the run, and reads ahead. Args: has_news: there is an answer in any case."""
        first, tiers = find.next, []
        while find.next < find.end:
            arrived = find.arrived.pop(find.next, None)
            if arrived is None and find.ahead == find.next:
                arrived = self._pin_ready(find.keys[find.next])
                find.ahead += arrived is not None
            if arrived is None:
                break
            slot, tier = arrived
            find.slots.append(slot)
            tiers.append(tier)
            if not find.for_peer:
                self._counts.count_hits(tier, 1)
            find.next += 1
        self._read_ahead(find)
        if tiers or has_news or not find.is_waiting:
            self._send(find, first, tiers)

    def _end_at(self, find: RunningFind, end: int) -> None:
        """Ends the run before a page that will not come."""
        was_waiting = find.is_waiting
        self._truncate(find, end)
        if was_waiting and not find.is_waiting:
            self._send(find, find.next, [])

    def _send(self, find: RunningFind, first: int, tiers: list[int]) -> None:
        slots = find.slots[first : find.next]
        self._answer(
            find.session,
            Found(
                find.number,
                first,
                tuple(slots),
                tuple(map(self._memory.generations.__getitem__, slots)),
                tuple(tiers),
                find.end - find.next,
                find.question is not None,
            ),
        )
        self._waiting.pop(find, None)
        if find.is_waiting:
            find.deadline = self._clock() + PATIENCE_S
            self._waiting[find] = None

    def _pin_ready(self, key: bytes) -> tuple[int, int] | None:
        slots = self._memory.pin_run((key,))
        return (slots[0], HOST) if slots else None

    def _read_ahead(self, find: RunningFind) -> None:
        while find.ahead < min(find.end, find.next + READ_AHEAD):
            key = find.keys[find.ahead]
            slot = self._memory.slot(key)
            if slot is None:
                if len(self._reads) >= MAX_READS:
                    self._queue[find] = None
                    return
                slot = self._start_read(key, find.for_peer)
            if slot is None or self._memory.states[slot] == WRITING:
                self._truncate(find, find.ahead)
                return
            if self._memory.states[slot] == READING:
                self._reads[slot].waiting[find] = find.ahead
                find.coming[find.ahead] = slot
            else:
                self._memory.use(slot)
                self._memory.pin(slot)
                find.arrived[find.ahead] = (slot, HOST)
            find.ahead += 1

    def _start_read(self, key: bytes, for_peer: bool) -> int | None:
        holder = self._holder(key, for_peer)
        if holder is None:
            return None
        number, tier, page = holder
        slot = self._memory.allocate(page, READING)
        if slot is not None:
            self._reads[slot] = SlowRead(number)
            tier.read(page, slot)
        return slot

    def _truncate(self, find: RunningFind, end: int) -> None:
        """Expects no page from `end` on."""
        if end <= find.end and find.question is not None:
            self._count_missed(find)
            del self._asking[find.question]
            for tier in self._asked_tiers:
                tier.cancel(find.question)
            find.question = None
        find.end = min(find.end, end)
        for index in [index for index in find.coming if index >= end]:
            del self._reads[find.coming.pop(index)].waiting[find]
        for index in [index for index in find.arrived if index >= end]:
            self._memory.unpin((find.arrived.pop(index)[0],))
        find.ahead = min(find.ahead, find.end)
        if find.ahead == find.end:
            self._queue.pop(find, None)
