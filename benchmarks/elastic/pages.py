"""A simulated worker's pool: locked tokens, and cached prefixes by block.

A block stands for PAGE_SIZE tokens and has the identity of its prefix (tandem/prefix.py), so the router's code works on
simulated workers as it does on real ones. Prompts without blocks share nothing.
"""

import struct
from collections.abc import Sequence

# Tokens of a block; Mooncake's traces have blocks of this size.
PAGE_SIZE = 512
_IDENTITY = struct.Struct("<Q")


class Pages:
    """
    Attributes:
        num_locked: tokens of running requests; a shared block counts once.
    """

    def __init__(self, num_tokens: int, *, reports: bool = True) -> None:
        """Args: reports: keep the changes for reports to the routers."""
        self.num_tokens = num_tokens
        self.num_locked = 0
        self._reports = reports
        # Users of each locked block.
        self._locked: dict[int, int] = {}
        # Unlocked cached blocks, least recently used first.
        self._cached: dict[int, None] = {}
        # Changes that the routers do not know: whether a block is cached now.
        self._changes: dict[int, bool] = {}

    @property
    def num_free(self) -> int:
        """Tokens that a request can have, after evictions."""
        return self.num_tokens - self.num_locked

    @property
    def num_cached(self) -> int:
        return PAGE_SIZE * len(self._cached)

    @property
    def identities(self) -> list[int]:
        return [*self._locked, *self._cached]

    def match(self, blocks: Sequence[int]) -> int:
        """Returns the number of leading tokens that are cached."""
        locked, cached = self._locked, self._cached
        for number, block in enumerate(blocks):
            if block not in locked and block not in cached:
                return PAGE_SIZE * number
        return PAGE_SIZE * len(blocks)

    def num_lacking(self, blocks: Sequence[int], num_tokens: int) -> int:
        """Returns the tokens that a request would lock besides those of others."""
        return num_tokens - PAGE_SIZE * sum(block in self._locked for block in blocks)

    def lock(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Locks the pages of a request of `num_tokens`, which begins with `blocks`. The caller looks at `num_free`
        first: they may exceed the pool."""
        locked, cached = self._locked, self._cached
        shared = 0
        for block in blocks:
            users = locked.get(block, 0)
            locked[block] = users + 1
            if users:
                shared += 1
            elif block in cached:
                del cached[block]
            elif self._reports:
                self._changes[block] = True
        self.num_locked += num_tokens - PAGE_SIZE * shared
        self._evict()

    def grow(self, num_tokens: int) -> None:
        """Locks private tokens, or unlocks them if negative."""
        self.num_locked += num_tokens
        if self._cached:
            self._evict()

    def unlock(self, blocks: Sequence[int], num_tokens: int, *, keeps: bool = True) -> None:
        """Args: keeps: the blocks are computed, and stay cached."""
        locked, cached = self._locked, self._cached
        shared = 0
        # The first block becomes the latest: a prefix outlives what follows it.
        for block in reversed(blocks):
            users = locked[block]
            if users > 1:
                locked[block] = users - 1
                shared += 1
                continue
            del locked[block]
            if keeps:
                cached[block] = None
            elif self._reports:
                self._changes[block] = False
        self.num_locked -= num_tokens - PAGE_SIZE * shared

    def take_changes(self) -> tuple[bytes, bytes] | None:
        """Returns the stored and removed identities since the last call, packed; None: there are none."""
        changes, self._changes = self._changes, {}
        if not changes:
            return None
        stored = [block for block, is_cached in changes.items() if is_cached]
        return pack(stored), pack([block for block, is_cached in changes.items() if not is_cached])

    def _evict(self) -> None:
        cached = self._cached
        while cached and self.num_locked + PAGE_SIZE * len(cached) > self.num_tokens:
            block = next(iter(cached))
            del cached[block]
            if self._reports:
                self._changes[block] = False


def pack(identities: Sequence[int]) -> bytes:
    return b"".join(map(_IDENTITY.pack, identities))
