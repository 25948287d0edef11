from collections.abc import Callable

from tandem.decode_worker.growth import PageGrowth
from tandem.decode_worker.job import DecodeJob
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.fakes.scripted_tier import ScriptedTier

PAGE_SIZE = 2


class Jobs:
    """Running jobs of two tokens each, whose next token needs a page, in a full pool.

    Attributes:
        ended: jobs given back, in order.
        in_flight: releases pages of a step in flight, if there is one.
    """

    def __init__(self, priorities: tuple[int, ...], num_spare: int = 0, max_batch_size: int = 8) -> None:
        self.cache = CacheManager(len(priorities) + num_spare, PAGE_SIZE)
        self.tier = ScriptedTier()
        self.in_flight: Callable[[], None] | None = None
        self.ended: list[DecodeJob] = []
        self.running = [self._job(i, priority) for i, priority in enumerate(priorities)]
        self.growth = PageGrowth(self.cache, self.tier, max_batch_size, self._collect, self._give_back)

    def grow(self) -> list[str]:
        return [job.request_id for job in self.growth.grow(self.running)]

    def _job(self, number: int, priority: int) -> DecodeJob:
        token_ids = [100 * number, 100 * number + 1]
        handle = self.cache.acquire_pages(token_ids, PAGE_SIZE, max_cached_len=0)
        assert handle is not None
        sequence = TokenSequence(
            token_ids, 1, handle.page_ids, cached_len=PAGE_SIZE, sampling=SamplingParams(9), table_id=handle.table_id
        )
        return DecodeJob(f"r{number}", 0, number, priority, sequence, handle, 0, [], [], 0, 0, 0)

    def _collect(self) -> bool:
        ends, self.in_flight = self.in_flight, None
        if ends is None:
            return False
        ends()
        return True

    def _give_back(self, job: DecodeJob) -> None:
        self.running.remove(job)
        self.ended.append(job)
        self.cache.release_pages(job.handle)
        self.cache.free_deferred_pages()


def test_the_lowest_priority_is_given_back_and_never_the_first() -> None:
    jobs = Jobs((0, 1, 0, 2))
    assert jobs.grow() == ["r0", "r3"]
    assert [job.request_id for job in jobs.ended] == ["r2", "r1"]
    alone = Jobs((0,))
    assert alone.grow() == [] and not alone.ended


def test_steps_in_flight_are_collected_before_anybody_is_given_back() -> None:
    jobs = Jobs((0, 0))
    held = jobs.running.pop()

    def end_step() -> None:
        jobs.cache.release_pages(held.handle)
        jobs.cache.free_deferred_pages()

    jobs.in_flight = end_step
    assert jobs.grow() == ["r0"] and not jobs.ended and jobs.in_flight is None and not jobs.tier.num_asked


def test_a_job_without_a_page_waits_for_copies_and_the_others_go_on() -> None:
    jobs = Jobs((0, 0, 0), num_spare=1)
    jobs.tier.num_yields = 2
    assert jobs.grow() == ["r0"] and jobs.growth.waits_for_copies and not jobs.ended
    # No copy holds a page any more.
    assert len(jobs.grow()) == 1 + 1 and not jobs.growth.waits_for_copies
    assert len(jobs.ended) == 1


def test_a_batch_has_a_maximum() -> None:
    assert Jobs((0, 0, 0), num_spare=3, max_batch_size=2).grow() == ["r0", "r1"]
