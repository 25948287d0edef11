"""Reports cached or stored prefixes to routers.

The owner of the pages only passes changes to an account on the asyncio thread, so a slow router costs it no time.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from tandem.messages import CachedPrefixes
from tandem.page_changes import PageChanges
from tandem.prefix import IDENTITY_BYTES
from tandem.rpc.batch_writer import BatchWriter

# Identities in one message: building it holds the interpreter lock for a fraction of a millisecond.
PART_IDENTITIES = 2048
# Limit of unread changes, and of unread parts of the whole account: a few seconds of a busy worker.
MAX_UNREAD_BYTES = 2**20


class CacheAccount:
    """The identities of all pages, by tier.

    Attributes:
        part_identities: most identities in one message.
    """

    def __init__(self, part_identities: int = PART_IDENTITIES) -> None:
        self.part_identities = part_identities
        self._by_tier: dict[int, set[bytes]] = {0: set()}

    def __len__(self) -> int:
        return sum(map(len, self._by_tier.values()))

    def apply(self, changes: PageChanges, tier: int = 0) -> None:
        identities = self._by_tier.setdefault(tier, set())
        identities.difference_update(changes.removed)
        identities.update(changes.stored)

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """Yields tier and packed identities; at least one part, possibly empty. The account may change meanwhile: a
        part has no identity that is gone, and may lack those added since the first part of its tier."""
        is_first = True
        for tier, identities in tuple(self._by_tier.items()):
            snapshot = iter(tuple(identities))
            while part := tuple(islice(snapshot, self.part_identities)):
                if stored := b"".join([identity for identity in part if identity in identities]):
                    yield tier, stored
                    is_first = False
        if is_first:
            yield 0, b""


class PrefixFeed:
    """Keeps one router informed. A router with too many unread changes is sent nothing until it has read them, then the
    whole account, in parts at the router's pace."""

    def __init__(self, account: CacheAccount, writer: BatchWriter, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._account = account
        self._writer = writer
        self._max_unread_bytes = max_unread_bytes
        self._number = 0
        self._unread_changes = _Unread()
        self._unread_parts = _Unread()
        self._last_place = 0
        self._is_behind = True
        # Parts of the whole account that are still to be sent.
        self._parts: Iterator[tuple[int, bytes]] | None = None
        self._is_first_part = True

    def begin_anew(self) -> None:
        """Starts over: the router has no account or a wrong one."""
        self._is_behind = True
        self._parts = None
        self.catch_up()

    def catch_up(self) -> None:
        """Sends the whole account to a router that was behind and has caught up, as far as the router reads."""
        self._note_read()
        if self._is_behind and self._writer.num_taken >= self._last_place:
            self._is_behind = False
            self._parts = self._account.parts()
            self._is_first_part = True
        while self._parts is not None and self._unread_parts.num_bytes < self._max_unread_bytes:
            if (part := next(self._parts, None)) is None:
                self._parts = None
                break
            tier, stored = part
            self._say(CachedPrefixes(self._number, is_whole=self._is_first_part, stored=stored, tier=tier))
            self._is_first_part = False
            self._unread_parts.add(self._last_place, len(stored))

    def tell_changes(self, stored: bytes, removed: bytes, tier: int = 0) -> None:
        """Sends changes of the account, which contains them already. Args: packed identities."""
        self._note_read()
        num_bytes = len(stored) + len(removed)
        if self._is_behind or self._unread_changes.num_bytes + num_bytes > self._max_unread_bytes:
            self.begin_anew()
            return
        size = self._account.part_identities * IDENTITY_BYTES
        for start in range(0, max(len(stored), len(removed)), size):
            part = slice(start, start + size)
            self._say(CachedPrefixes(self._number, False, stored[part], removed[part], tier))
            self._unread_changes.add(self._last_place, len(stored[part]) + len(removed[part]))

    def _say(self, message: CachedPrefixes) -> None:
        self._number += 1
        self._writer.send([message])
        self._last_place = self._writer.num_sent

    def _note_read(self) -> None:
        self._unread_changes.note_read(self._writer.num_taken)
        self._unread_parts.note_read(self._writer.num_taken)


class _Unread:
    """Messages that gRPC has not taken."""

    def __init__(self) -> None:
        self.num_bytes = 0
        # (place in the stream, bytes) of each.
        self._messages: deque[tuple[int, int]] = deque()

    def add(self, place: int, num_bytes: int) -> None:
        self._messages.append((place, num_bytes))
        self.num_bytes += num_bytes

    def note_read(self, num_taken: int) -> None:
        while self._messages and self._messages[0][0] <= num_taken:
            self.num_bytes -= self._messages.popleft()[1]
