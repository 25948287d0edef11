"""Stored pages of workers with several ranks, over pools and a region in host memory, with followers in threads."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.ranks.config import RankConfig
from tandem.pagestore.client.base import RegionCopy
from tandem.pagestore.client.cpu_copies import CpuRegionCopies
from tandem.pagestore.client.rank_copies import FollowerCopies, PagePart, PartCopies, RankCopies
from tandem.worker.ranks.channel import MessageChannel
from tandem.worker.ranks.lane_thread import LaneThread

NUM_PAGES, NUM_SLOTS = 6, 5
BY_HEAD = KvHeadLayout(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
LATENT = LatentLayout(num_layers=2, page_size=4, kv_rank=8, rope_dim=4, dtype="bfloat16")


class Pausing(CpuRegionCopies):
    """Attributes: may_run: cleared while the rank stands still."""

    may_run: threading.Event

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        assert self.may_run.wait(10.0)
        return super().copy_out(page_ids, slots)


class Worker:
    """Attributes: pools: of each rank; region: (num_slots, bytes of a page with all heads)."""

    def __init__(self, layout: PageLayout, degree: int, failure: str = "") -> None:
        layouts = [layout.shard(rank, degree) for rank in range(degree)]
        self.pools = [np.zeros((NUM_PAGES, each.page_bytes), np.uint8) for each in layouts]
        self.region = np.zeros((NUM_SLOTS, layout.page_bytes), np.uint8)
        self.may_run = threading.Event()
        self.may_run.set()
        regions = [self.region.reshape(-1, pool.shape[1]) for pool in self.pools]
        parts = [PagePart.of(each, RankConfig(rank, degree)) for rank, each in enumerate(layouts)]
        self.writers = [part.is_writer for part in parts]
        self._channels: list[MessageChannel] = []
        for pool, region, part in zip(self.pools[1:], regions[1:], parts[1:], strict=True):
            here, there = map(MessageChannel, MessageChannel.pair())
            self._channels.append(here)
            LaneThread(partial(self._follow, pool, region, part, failure), there, lambda: None)
        self.copies = RankCopies(PartCopies(CpuRegionCopies(self.pools[0], regions[0]), parts[0]), self._channels)

    def close(self) -> None:
        self.copies.close()
        for channel in self._channels:
            channel.close()

    def _follow(self, pool: np.ndarray, region: np.ndarray, part: PagePart, failure: str) -> FollowerCopies:
        copies = Pausing(pool, region)
        copies.may_run = self.may_run
        return FollowerCopies(None if failure else PartCopies(copies, part), is_writer=part.is_writer, failure=failure)


@contextmanager
def worker(layout: PageLayout, degree: int) -> Iterator[Worker]:
    one = Worker(layout, degree)
    yield one
    one.close()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("layout", [BY_HEAD, LATENT], ids=["by_head", "latent"])
def test_pages_of_all_ranks_go_both_ways(layout: PageLayout, degree: int) -> None:
    rng = np.random.default_rng(0)
    with worker(layout, degree) as one:
        heads = [layout.shard(rank, degree).heads for rank in range(degree)]
        # Ranks with the same heads have the same pages.
        content = {each: rng.integers(1, 256, (NUM_PAGES, one.pools[0].shape[1]), np.uint8) for each in heads}
        for pool, each in zip(one.pools, heads, strict=True):
            pool[:] = content[each]
        wait(one.copies.copy_out([1, 5], [4, 2]).done)
        assert one.region[[4, 2]].all() and not one.region[[0, 1, 3]].any(), "a page fills its slot, and no other"
        wait(one.copies.copy_in([4, 2], [0, 3]).done)
        for pool, each in zip(one.pools, heads, strict=True):
            expected = content[each].copy()
            expected[[0, 3]] = expected[[1, 5]]
            assert np.array_equal(pool, expected)


def test_each_part_has_one_writer() -> None:
    with worker(BY_HEAD, 4) as one:
        assert one.writers == [True, False, True, False]
    with worker(LATENT, 2) as one:
        assert one.writers == [True, False]


def test_a_copy_is_done_when_the_slowest_rank_has_copied() -> None:
    """Otherwise the store would show a page that is not whole, or the pool would free one that is still read."""
    with worker(BY_HEAD, 2) as one:
        for pool in one.pools:
            pool[:] = 7
        one.may_run.clear()
        copied = one.copies.copy_out([1], [1])
        time.sleep(0.05)
        assert not copied.done() and not one.region[1].all()
        one.may_run.set()
        wait(copied.done)
        assert one.region[1].all()


def test_no_rank_uses_a_region_that_another_has_not() -> None:
    with pytest.raises(RuntimeError, match=r"^another rank: its GPU refuses it$"):
        Worker(BY_HEAD, 2, failure="its GPU refuses it")
