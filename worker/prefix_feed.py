"""Reports a worker's cached prefixes to routers.

The engine thread only pushes changes to an account on the asyncio thread, so a slow router costs no step time.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from tandem.engine.kvcache.cache_changes import CacheChanges
from tandem.messages import CachedPrefixes
from tandem.rpc.batch_writer import BatchWriter

# Identities in one message: building it holds the interpreter lock for a fraction of a millisecond.
PART_IDENTITIES = 2048
# Limit of unread changes: a few seconds of a busy worker.
MAX_UNREAD_BYTES = 2**20


class CacheAccount:
    """The identities of all cached pages."""

    def __init__(self) -> None:
        self._identities: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._identities)

    def apply(self, changes: CacheChanges) -> None:
        self._identities.difference_update(changes.removed)
        self._identities.update(changes.stored)

    def parts(self) -> Iterator[bytes]:
        """Yields all identities, packed; at least one part, possibly empty."""
        identities = iter(self._identities)
        yield b"".join(islice(identities, PART_IDENTITIES))
        while part := b"".join(islice(identities, PART_IDENTITIES)):
            yield part


class PrefixFeed:
    """Keeps one router informed. A router with too many unread changes is sent nothing until it has read them, then the
    whole account."""

    def __init__(self, account: CacheAccount, writer: BatchWriter, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._account = account
        self._writer = writer
        self._max_unread_bytes = max_unread_bytes
        self._number = 0
        # (place in the stream, bytes) of each untaken message.
        self._unread: deque[tuple[int, int]] = deque()
        self._num_unread_bytes = 0
        self._last_place = 0
        self._is_behind = True

    def begin_anew(self) -> None:
        """Starts over: the router has no account or a wrong one."""
        self._is_behind = True
        self.catch_up()

    def catch_up(self) -> None:
        """Sends the whole account to a router that was behind and has caught up."""
        if self._is_behind and self._writer.num_taken >= self._last_place:
            self._is_behind = False
            for position, part in enumerate(self._account.parts()):
                self._say(CachedPrefixes(self._number, is_whole=position == 0, stored=part))

    def tell_changes(self, stored: bytes, removed: bytes) -> None:
        self._note_read()
        num_bytes = len(stored) + len(removed)
        if self._is_behind or self._num_unread_bytes + num_bytes > self._max_unread_bytes:
            # The account already contains these changes.
            self.begin_anew()
            return
        self._say(CachedPrefixes(self._number, is_whole=False, stored=stored, removed=removed))
        self._unread.append((self._last_place, num_bytes))
        self._num_unread_bytes += num_bytes

    def _say(self, message: CachedPrefixes) -> None:
        self._number += 1
        self._writer.send([message])
        self._last_place = self._writer.num_sent

    def _note_read(self) -> None:
        while self._unread and self._unread[0][0] <= self._writer.num_taken:
            self._num_unread_bytes -= self._unread.popleft()[1]
