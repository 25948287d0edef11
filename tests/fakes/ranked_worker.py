"""A worker of several ranks as its links see it: a pool for each rank, and followers in threads."""

import queue
import threading
from collections.abc import Sequence

import numpy as np

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.lanes.follower import LaneFollower
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.lanes.remote import RemoteRank
from tandem.kvtransfer.transports.opening import load_transports
from tandem.messages import LinkRank
from tandem.rpc.credentials import ClusterCredentials

TRANSPORTS = ("shared_memory", "tcp")
POLL_S = 0.001


class FollowerThread:
    """Drives a follower's lanes; a RankChannel for its leader. Attributes: may_run: cleared while it stands still."""

    def __init__(self, follower: LaneFollower) -> None:
        self.follower = follower
        self.may_run = threading.Event()
        self.may_run.set()
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        self._commands.put(message)

    def receive(self) -> list[bytes]:
        return [self._reports.get() for _ in range(self._reports.qsize())]

    def stop(self) -> None:
        self.may_run.set()
        self._commands.put(None)
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                message = self._commands.get(timeout=POLL_S)
            except queue.Empty:
                message = b""
            self.may_run.wait()
            if message is None:
                return
            if message:
                self.follower.obey(message)
            for report in self.follower.poll():
                self._reports.put(report)


class RankedWorker:
    """
    Attributes:
        pools: of each rank.
        followers: threads of the ranks from 1 on.
        ranks: for the worker's links.
    """

    def __init__(self, layout: PageLayout, degree: int, num_pages: int, name: str) -> None:
        """Args: layout: of pages with all heads."""
        self.layout = layout
        self.pools = [CpuKvPool(layout.shard(rank, degree), num_pages, f"{name}-{rank}") for rank in range(degree)]
        transports = [load_transports(TRANSPORTS, pool, "127.0.0.1", ClusterCredentials()) for pool in self.pools]
        self.followers = [FollowerThread(LaneFollower(own)) for own in transports[1:]]
        remote = [
            RemoteRank(LinkRank(1, "", pool.layout.heads), follower)
            for pool, follower in zip(self.pools[1:], self.followers, strict=True)
        ]
        self.ranks = LinkRanks.of(self.pools[0], transports[0], remote)

    def fill(self, pages: np.ndarray) -> None:
        """Args: pages: (num_pages, bytes of all heads) uint8."""
        for pool in self.pools:
            pool.memory.numpy()[:] = self._of(pool, pages)

    def holds(self, page_ids: Sequence[int], pages: np.ndarray) -> bool:
        """Returns whether every rank holds its heads of `pages` at `page_ids`."""
        return all(np.array_equal(pool.memory.numpy()[list(page_ids)], self._of(pool, pages)) for pool in self.pools)

    def is_untouched(self, page_ids: Sequence[int]) -> bool:
        return not any(pool.memory.numpy()[list(page_ids)].any() for pool in self.pools)

    def stop(self) -> None:
        for follower in self.followers:
            follower.stop()

    def _of(self, pool: CpuKvPool, pages: np.ndarray) -> np.ndarray:
        heads, head_bytes = pool.layout.heads, pool.layout.head_bytes
        by_head = pages.reshape(len(pages), -1, heads.total, head_bytes)
        return by_head[:, :, heads.first : heads.end].reshape(len(pages), -1)
