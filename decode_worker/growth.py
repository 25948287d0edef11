from collections.abc import Callable, Sequence

from tandem.decode_worker.job import DecodeJob
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.worker.page_tier import PageTier


class PageGrowth:
    """Allocates the pages of each decode step.

    Attributes:
        waits_for_copies: whether a running request waits for pages that copies to the page store hold.
    """

    def __init__(
        self,
        cache: CacheManager,
        tier: PageTier,
        max_batch_size: int,
        collect_steps: Callable[[], bool],
        give_back: Callable[[DecodeJob], None],
    ) -> None:
        """
        Args:
            collect_steps: collects the steps in flight and frees what they ended. Returns whether there were any.
            give_back: removes a job from the running ones and frees its pages.
        """
        self._cache = cache
        self._tier = tier
        self._max_batch_size = max_batch_size
        self._collect_steps = collect_steps
        self._give_back = give_back
        self.waits_for_copies = False

    def grow(self, running: Sequence[DecodeJob]) -> list[DecodeJob]:
        """Allocates the next page for each job of the next batch, in order, and returns the batch. Without pages, gives
        back the job with the lowest priority and fewest tokens, but never the first, so that one always finishes. While
        copies to the page store hold pages, a job without one waits instead, and the others go on.

        Args:
            running: a live list, the oldest first.
        """
        self.waits_for_copies = False
        batch: list[DecodeJob] = []
        # Nearly always empty.
        given_back: list[DecodeJob] = []
        for job in [job for job in running if job.needs_step][: self._max_batch_size]:
            if job in given_back:
                continue
            while not self._cache.grow_pages(job.handle, job.sequence.cached_len + 1):
                # Steps in flight may free pages; their jobs' pages are not free before.
                if self._collect_steps():
                    return self.grow(running)
                if self._tier.yields_pages():
                    self.waits_for_copies = True
                    break
                victims = running[1:]
                if not victims:
                    return batch
                victim = min(victims, key=lambda v: (v.priority, len(v.sequence.token_ids)))
                self._give_back(victim)
                given_back.append(victim)
                if victim in batch:
                    batch.remove(victim)
                if victim is job:
                    break
            else:
                batch.append(job)
        return batch
