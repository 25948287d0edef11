"""Copies pages of the radix tree into the store."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.radix_cache import RadixNode
from tandem.engine.launch_list import LaunchList
from tandem.pagestore.client.base import RegionCopies
from tandem.pagestore.client.node_keys import NodeKeys
from tandem.pagestore.messages import NO_ROOM, PRESENT, GaveUp, Put, PutGranted, StoreClientMessage, Wrote
from tandem.prefix import split_namespace

# Pages that copies hold at a time, at most this share of the pool.
MAX_HELD, HELD_SHARE = 64, 1 / 8
# Pages of a copy.
COPY_PAGES = 32
# Pages offered to the store in a turn, and offered or granted but not yet copied.
PUT_PAGES, MAX_ASKED = 64, 256
# Matched prefixes looked at in a turn.
MATCHES_PER_TURN = 4
# Limit on the store's answer, and pause after it had no room, in seconds.
ANSWER_S, NO_ROOM_S = 10.0, 0.05
# Poll interval for ended copies and forward passes, in seconds.
POLL_S = 0.0005


class _Granted(NamedTuple):
    node: RadixNode
    slot: int
    generation: int


@dataclass(eq=False, slots=True)
class _Write:
    """A running copy. Attributes: message: to be sent when it has ended; None: the session is over."""

    page_ids: list[int]
    completion: Completion
    message: Wrote | GaveUp | None


class PageWriter:
    """Offers pages to the store, and copies those that it wants.

    New pages are offered when no forward pass writes them any more, parents first. Pages that found no room, or were
    offered long ago, are offered again when a request reuses them. A page is held only while it is copied.
    """

    def __init__(
        self,
        cache: CacheManager,
        launches: LaunchList,
        copies: RegionCopies,
        keys: NodeKeys,
        clock: Callable[[], float],
        write_after: int,
        numbers: Iterator[int],
        send: Callable[[StoreClientMessage], None],
    ) -> None:
        """
        Args:
            numbers: of Puts, unique in the tier.
            write_after: hits of a page before it is offered; 0: new pages are.
        """
        self._cache = cache
        self._launches = launches
        self._copies = copies
        self._keys = keys
        self._clock = clock
        self._write_after = write_after
        self._send = send
        self._watch = cache.watch_tree()
        self._max_held = max(1, min(MAX_HELD, int(cache.num_pages * HELD_SHARE)))
        self._is_open = False
        self._numbers = numbers
        self._reused: deque[RadixNode] = deque()
        # Offered pages and the time, by number of the Put.
        self._asked: dict[int, tuple[list[RadixNode], float]] = {}
        self._num_asked = 0
        self._granted: deque[_Granted] = deque()
        self._writes: list[_Write] = []
        self._num_held = 0
        self._paused_until = 0.0
        # Page that a forward pass was writing: until its end, no other is looked at.
        self._unready: int | None = None

    @property
    def num_held_pages(self) -> int:
        """Pool pages that copies read."""
        return self._num_held

    def open(self) -> None:
        """Begins a session."""
        self._is_open = True

    def close(self) -> None:
        """Ends a session. Running copies go on."""
        self._is_open = False
        self._asked.clear()
        self._num_asked = 0
        self._granted.clear()
        for write in self._writes:
            write.message = None

    def reset(self) -> None:
        """Forgets all pages to be written, for good. Pages being written do not become visible."""
        self._cache.withhold_pages()
        self._watch.entered.clear()
        self._watch.matched.clear()
        self._reused.clear()
        # Their answers come for unknown numbers.
        self._asked.clear()
        self._num_asked = 0
        self._give_up(list(self._granted))
        self._granted.clear()
        for write in self._writes:
            if isinstance(write.message, Wrote):
                write.message = GaveUp(write.message.slots, write.message.generations)

    def check_integrity(self) -> str:
        """Returns the first violation of the accounting of offers and copies, or ""."""
        held = sum(len(write.page_ids) for write in self._writes)
        if held != self._num_held:
            return f"copies read {held} pages, but count {self._num_held}"
        asked = sum(len(nodes) for nodes, _ in self._asked.values())
        return "" if asked == self._num_asked else f"{asked} pages are offered, but counted as {self._num_asked}"

    def receive(self, answer: PutGranted) -> None:
        nodes, _ = self._asked.pop(answer.number, ([], 0.0))
        self._num_asked -= len(nodes)
        if not len(nodes) == len(answer.slots) == len(answer.generations):
            # Forgotten, or not an answer to what was asked.
            pairs = zip(answer.slots, answer.generations, strict=False)
            slots = [(slot, generation) for slot, generation in pairs if slot >= 0]
            self._send_given_up(slots)
            return
        for node, slot, generation in zip(nodes, answer.slots, answer.generations, strict=True):
            if slot == NO_ROOM:
                node.store_mark = 0
                self._paused_until = self._clock() + NO_ROOM_S
            elif slot != PRESENT:
                self._granted.append(_Granted(node, slot, generation))

    def collect(self) -> None:
        """Lets go the pages of ended copies."""
        for write in [w for w in self._writes if w.completion.done()]:
            self._writes.remove(write)
            self._num_held -= len(write.page_ids)
            for page_id in write.page_ids:
                self._cache.let_go_page(page_id)
            if write.message is not None:
                self._send(write.message)

    def go_on(self, mark: int, *, may_start: bool) -> None:
        """Offers pages, and starts copies if allowed.

        Args:
            mark: set on offered pages; those that have it are not offered again.
        """
        self._take_reused(mark)
        if self._write_after:
            self._watch.entered.clear()
        if not self._is_open:
            return
        now = self._clock()
        self._expire(now)
        if now >= self._paused_until:
            self._offer(mark, now)
        if may_start:
            self._start_copies()

    def next_deadline(self) -> float | None:
        if not self._is_open:
            return self._clock() + POLL_S if self._writes else None
        now = self._clock()
        deadlines = [asked_at + ANSWER_S for _, asked_at in self._asked.values()][:1]
        if self._writes or self._granted:
            deadlines.append(now + POLL_S)
        has_new = bool(self._watch.entered) and not self._write_after
        if (has_new or self._reused or self._watch.matched) and self._num_unanswered < MAX_ASKED:
            deadlines.append(max(now + POLL_S, self._paused_until))
        return min(deadlines, default=None)

    @property
    def _num_unanswered(self) -> int:
        return self._num_asked + len(self._granted)

    def _take_reused(self, mark: int) -> None:
        matched = self._watch.matched
        for _ in range(min(len(matched), MATCHES_PER_TURN)):
            node = matched.popleft()
            path = []
            # Pages before one that was offered lately were offered or are new.
            while node.parent is not None and (self._write_after or node.store_mark != mark):
                node.store_hits += 1
                if node.store_mark != mark and not node.is_withheld and node.store_hits >= self._write_after:
                    path.append(node)
                node = node.parent
            if len(self._reused) + len(path) <= self._cache.num_pages:
                self._reused.extend(reversed(path))

    def _expire(self, now: float) -> None:
        for number, (nodes, asked_at) in list(self._asked.items())[:1]:
            if now >= asked_at + ANSWER_S:
                del self._asked[number]
                self._num_asked -= len(nodes)
                for node in nodes:
                    node.store_mark = 0

    def _offer(self, mark: int, now: float) -> None:
        if self._unready is not None and not self._launches.num_ready([self._unready]):
            return
        nodes = list(self._candidates(mark, min(PUT_PAGES, MAX_ASKED - self._num_unanswered)))
        num_ready = self._launches.num_ready([node.page_id for node in nodes]) if nodes else 0
        self._unready = nodes[num_ready].page_id if num_ready < len(nodes) else None
        # The rest is looked at again in the next turn, before its descendants.
        for node in reversed(nodes[num_ready:]):
            node.store_mark = 0
            self._reused.appendleft(node)
        chain: list[RadixNode] = []
        for node in nodes[:num_ready]:
            if chain and node.parent is not chain[-1]:
                self._put(chain, now)
                chain = []
            chain.append(node)
        if chain:
            self._put(chain, now)

    def _candidates(self, mark: int, num_pages: int) -> Iterator[RadixNode]:
        """Removes, marks and yields pages to offer, with their keys hashed."""
        for queue in (self._reused, self._watch.entered):
            while queue and num_pages > 0:
                node = queue[0]
                if node.is_evicted or node.store_mark == mark:
                    queue.popleft()
                    continue
                if self._keys.of(node) is None:
                    return
                queue.popleft()
                num_pages -= 1
                node.store_mark = mark
                yield node

    def _put(self, chain: list[RadixNode], now: float) -> None:
        parent = chain[0].parent
        assert parent is not None
        root = parent
        while root.parent is not None:
            root = root.parent
        number = next(self._numbers)
        self._asked[number] = chain, now
        self._num_asked += len(chain)
        self._send(
            Put(
                number,
                # Quotas count an adapter's pages to the same owner.
                split_namespace(self._cache.namespace_of(root))[0],
                b"" if parent.is_root else parent.store_key or b"",
                tuple(node.store_key or b"" for node in chain),
                tuple(node.identity for node in chain),
            )
        )

    def _start_copies(self) -> None:
        while self._granted and self._num_held < self._max_held:
            num_pages = min(len(self._granted), COPY_PAGES, self._max_held - self._num_held)
            batch = [self._granted.popleft() for _ in range(num_pages)]
            self._give_up([granted for granted in batch if granted.node.is_evicted])
            batch = [granted for granted in batch if not granted.node.is_evicted]
            if not batch:
                continue
            for granted in batch:
                self._cache.hold_page(granted.node)
            self._num_held += len(batch)
            page_ids = [granted.node.page_id for granted in batch]
            slots = tuple(granted.slot for granted in batch)
            message = Wrote(slots, tuple(granted.generation for granted in batch))
            self._writes.append(_Write(page_ids, self._copies.copy_out(page_ids, slots), message))

    def _give_up(self, granted: list[_Granted]) -> None:
        self._send_given_up([(g.slot, g.generation) for g in granted])

    def _send_given_up(self, slots: list[tuple[int, int]]) -> None:
        if slots:
            self._send(GaveUp(tuple(slot for slot, _ in slots), tuple(generation for _, generation in slots)))
