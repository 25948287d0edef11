"""Copies between the region and the pools of a worker's ranks: a stored page is the ranks' pages, one behind the other.

Each rank copies its own part. Of ranks with the same heads the first one copies out; all copy in.
"""

import json
import struct
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from tandem.engine.kvcache.base import Completion, PageLayout
from tandem.engine.ranks.config import RankConfig
from tandem.pagestore.client.base import RegionCopies, RegionCopy
from tandem.pagestore.client.copy_thread import CLOSE_S
from tandem.worker.base import LaneDriver, MessagePipe

# Limit on the followers' mapping of the region, in seconds: GPUs register it.
READY_S = 600.0
_POLL_S = 0.001
# Kind and number of pages. Their ids and slots follow, 32 bits each.
_COMMAND = struct.Struct("<ii")
# Copies that have ended: out, in.
_REPORT = struct.Struct("<qq")


class _Kind(IntEnum):
    OUT = 0
    IN = 1
    CLOSE = 2


class PagePart(NamedTuple):
    """A rank's part of a stored page. Attributes: number, num_parts: all parts have the size of the rank's pages."""

    number: int
    num_parts: int
    is_writer: bool

    @classmethod
    def of(cls, layout: PageLayout, ranks: RankConfig) -> "PagePart":
        """Args: layout: of the rank's pages."""
        heads, num_parts = layout.heads, layout.whole.page_bytes // layout.page_bytes
        assert num_parts * layout.page_bytes == layout.whole.page_bytes and heads.total == num_parts * heads.num
        is_writer = ranks.is_leader or layout.whole.shard(ranks.rank - 1, ranks.degree).heads != heads
        return cls(heads.first // heads.num, num_parts, is_writer)

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Returns the rows of slots in a region of parts."""
        return [slot * self.num_parts + self.number for slot in slots]


class PartCopies(RegionCopies):
    """Copies of one rank."""

    def __init__(self, copies: RegionCopies, part: PagePart) -> None:
        """Args: copies: between the pool and the region's parts."""
        self._copies = copies
        self._part = part

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        return self._copies.copy_out(page_ids, self._part.rows(slots))

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> RegionCopy:
        return self._copies.copy_in(self._part.rows(slots), page_ids)

    def close(self) -> None:
        self._copies.close()


class _AllCopied:
    def __init__(self, own: RegionCopy, others: Sequence[Completion]) -> None:
        self._own = own
        self._left = [own, *others]

    def done(self) -> bool:
        while self._left and self._left[-1].done():
            self._left.pop()
        return not self._left

    @property
    def seconds(self) -> float:
        """Of the leader's part. The others are as large."""
        return self._own.seconds


class _FollowerCopied:
    """Done when the follower's first `count` copies of a direction have ended."""

    def __init__(self, follower: "_Follower", kind: _Kind, count: int) -> None:
        self._follower = follower
        self._kind = kind
        self._count = count

    def done(self) -> bool:
        return self._follower.has_ended(self._kind, self._count)


class _Follower:
    def __init__(self, pipe: MessagePipe) -> None:
        self._pipe = pipe
        self._num_started = [0, 0]
        self._num_ended: Sequence[int] = (0, 0)
        self._is_writer = True

    def wait_ready(self, deadline: float) -> None:
        """Raises RuntimeError: the follower has no region."""
        while not (messages := self._pipe.receive()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"a rank has not mapped the region within {READY_S:.0f} s")
            time.sleep(_POLL_S)
        ready = json.loads(messages[0])
        if ready["failure"]:
            raise RuntimeError(f"another rank: {ready['failure']}")
        self._is_writer = ready["is_writer"]

    def start(self, kind: _Kind, page_ids: Sequence[int], slots: Sequence[int]) -> list[Completion]:
        """Returns the copy's end; nothing if another rank copies it."""
        if kind == _Kind.OUT and not self._is_writer:
            return []
        numbers = np.array([*page_ids, *slots], np.int32)
        self._pipe.send(_COMMAND.pack(kind, len(page_ids)) + numbers.tobytes())
        self._num_started[kind] += 1
        return [_FollowerCopied(self, kind, self._num_started[kind])]

    def has_ended(self, kind: _Kind, count: int) -> bool:
        if self._num_ended[kind] < count:
            for message in self._pipe.receive():
                self._num_ended = _REPORT.unpack(message)
        return self._num_ended[kind] >= count

    @property
    def is_quiet(self) -> bool:
        return all(self.has_ended(kind, self._num_started[kind]) for kind in (_Kind.OUT, _Kind.IN))

    def close(self) -> None:
        self._pipe.send(_COMMAND.pack(_Kind.CLOSE, 0))


class RankCopies(RegionCopies):
    """The leader's side: copies are done when those of all ranks are. Belongs to one thread at a time."""

    def __init__(self, own: RegionCopies, followers: Sequence[MessagePipe]) -> None:
        """Waits until all followers have mapped the region. Raises RuntimeError: one has not; then none uses it."""
        self._own = own
        self._followers = [_Follower(pipe) for pipe in followers]
        deadline = time.monotonic() + READY_S
        try:
            for follower in self._followers:
                follower.wait_ready(deadline)
        except RuntimeError:
            self._end()
            raise

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        others = [end for follower in self._followers for end in follower.start(_Kind.OUT, page_ids, slots)]
        return _AllCopied(self._own.copy_out(page_ids, slots), others)

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> RegionCopy:
        others = [end for follower in self._followers for end in follower.start(_Kind.IN, page_ids, slots)]
        return _AllCopied(self._own.copy_in(slots, page_ids), others)

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        while not all(follower.is_quiet for follower in self._followers):
            if time.monotonic() > deadline:
                raise RuntimeError(f"copies of other ranks do not end within {CLOSE_S:.0f} s")
            time.sleep(_POLL_S)
        self._end()

    def _end(self) -> None:
        for follower in self._followers:
            follower.close()
        self._own.close()


class FollowerCopies(LaneDriver):
    """A follower's side. Belongs to one thread."""

    def __init__(self, copies: RegionCopies | None, *, is_writer: bool, failure: str = "") -> None:
        """Args: copies: of this rank's part; None without a region, for the reason in `failure`."""
        self._copies = copies
        self._reports = [json.dumps({"failure": failure, "is_writer": is_writer}).encode()]
        self._under_way: tuple[deque[RegionCopy], deque[RegionCopy]] = (deque(), deque())
        self._num_ended = [0, 0]

    @property
    def is_busy(self) -> bool:
        return any(self._under_way)

    def obey(self, message: bytes) -> None:
        kind, num_pages = _COMMAND.unpack_from(message)
        if kind == _Kind.CLOSE:
            copies, self._copies = self._copies, None
            if copies is not None:
                copies.close()
            return
        assert self._copies is not None
        numbers = np.frombuffer(message, np.int32, offset=_COMMAND.size).tolist()
        page_ids, slots = numbers[:num_pages], numbers[num_pages:]
        if kind == _Kind.OUT:
            self._under_way[kind].append(self._copies.copy_out(page_ids, slots))
        else:
            self._under_way[kind].append(self._copies.copy_in(slots, page_ids))

    def poll(self) -> Sequence[bytes]:
        """Raises RuntimeError: a copy failed."""
        before = list(self._num_ended)
        for kind, copies in enumerate(self._under_way):
            while copies and copies[0].done():
                copies.popleft()
                self._num_ended[kind] += 1
        if self._num_ended != before:
            self._reports.append(_REPORT.pack(*self._num_ended))
        reports, self._reports = self._reports, []
        return reports
