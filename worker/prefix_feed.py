"""What routers are told of a worker's cache: an account of it on the asyncio thread, and what of it each knows.

The engine thread says what has changed and is asked nothing, so a router that joins, or that was too slow, costs no
step anything.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from tandem.engine.kvcache.cache_changes import CacheChanges
from tandem.messages import CachedPrefixes
from tandem.rpc.batch_writer import BatchWriter

# One message says no more than this of all that is cached: putting it together keeps the interpreter from the engine
# thread for a fraction of a millisecond, and nothing waits long for it at a router.
PART_IDENTITIES = 2048
# Changes that a router has not read. It is what a busy worker says in some seconds.
MAX_UNREAD_BYTES = 2**20


class CacheAccount:
    """The identities of all pages in the cache."""

    def __init__(self) -> None:
        self._identities: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._identities)

    def apply(self, changes: CacheChanges) -> None:
        self._identities.difference_update(changes.removed)
        self._identities.update(changes.stored)

    def parts(self) -> Iterator[bytes]:
        """All of them, packed, in parts; at least one, which may be empty."""
        identities = iter(self._identities)
        yield b"".join(islice(identities, PART_IDENTITIES))
        while part := b"".join(islice(identities, PART_IDENTITIES)):
            yield part


class PrefixFeed:
    """Keeps one router informed, over one stream. Of what it does not read a bounded amount is kept for it: one that
    has fallen behind by more is told nothing until it has read that, and then begins anew."""

    def __init__(self, account: CacheAccount, writer: BatchWriter, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._account = account
        self._writer = writer
        self._max_unread_bytes = max_unread_bytes
        self._number = 0
        # For each message of changes that gRPC has not taken: its place in the stream, and its bytes.
        self._unread: deque[tuple[int, int]] = deque()
        self._num_unread_bytes = 0
        self._last_place = 0
        self._is_behind = True

    def begin_anew(self) -> None:
        """The router knows nothing, or not what it should."""
        self._is_behind = True
        self.catch_up()

    def catch_up(self) -> None:
        """Tells a router that has fallen behind all that is cached, if it has read what it was told before."""
        if self._is_behind and self._writer.num_taken >= self._last_place:
            self._is_behind = False
            for position, part in enumerate(self._account.parts()):
                self._say(CachedPrefixes(self._number, is_whole=position == 0, stored=part))

    def tell_changes(self, stored: bytes, removed: bytes) -> None:
        """The account has changed by so much since `catch_up` and this were last called."""
        self._note_read()
        num_bytes = len(stored) + len(removed)
        if self._is_behind or self._num_unread_bytes + num_bytes > self._max_unread_bytes:
            # They are in the account.
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
