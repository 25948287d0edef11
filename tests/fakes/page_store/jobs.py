"""Fake jobs over a real cache, launch list and tier: they wait for loads, acquire, compute, grow, give back and end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.engine.token_sequence import TokenSequence
from tandem.worker.page_tier import PrefetchKey
from tests.fakes.page_store.engine import SimForward, SimPart

if TYPE_CHECKING:
    from tests.fakes.page_store.worker import SimWorker

MAX_LAUNCHES = 2
CHUNK = 3
# Prompts at the front of the queue that are loaded; admissions are from their beginning.
NUM_PREFETCHED = 2


@dataclass(eq=False)
class Job:
    """
    Attributes:
        whole_ids: the prompt and all of its output.
        token_ids: the prompt, and after a give-back the output so far.
        kind: its prefetches are a prompt's or an admission's.
        attempt: raised by each give-back.
        num_launches: forward passes in flight.
    """

    number: int
    namespace: str
    whole_ids: list[int]
    token_ids: list[int]
    kind: str
    attempt: int = 0
    is_prefetched: bool = False
    ended: bool = False
    num_launches: int = 0
    handle: PageHandle | None = field(default=None, repr=False)
    _sequence: TokenSequence | None = field(default=None, repr=False)

    @property
    def key(self) -> PrefetchKey:
        return str(self.number), self.attempt, self.kind

    @property
    def sequence(self) -> TokenSequence:
        assert self._sequence is not None
        return self._sequence

    def begin(self, handle: PageHandle) -> None:
        self.handle = handle
        self._sequence = TokenSequence(
            list(self.token_ids),
            len(self.token_ids),
            handle.page_ids,
            cached_len=handle.cached_len,
            table_id=handle.table_id,
        )

    @property
    def is_prefilling(self) -> bool:
        """Parts of the prompt are not launched yet."""
        return self.sequence.device_len < len(self.token_ids) == self.sequence.length

    @property
    def needs_step(self) -> bool:
        return not self.num_launches and not self.is_prefilling and self.sequence.remaining_len > 0


class JobScheduler:
    """Continuous batching, oldest first: prompts in chunks beside decode steps, with two forward passes in flight."""

    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker
        self._cache, self._tier, self._launches = worker.cache, worker.tier, worker.launches
        self.queued: list[Job] = []
        self.running: list[Job] = []

    def submit(self, job: Job) -> None:
        self.queued.append(job)
        if job.kind == "decode":
            self._prefetch(job)

    def abort(self, job: Job) -> None:
        job.ended = True
        if job in self.queued:
            self.queued.remove(job)
            self._end_prefetch(job)
        else:
            self.running.remove(job)
            self._release(job)

    def step(self) -> bool:
        worked = False
        self._cache.free_deferred_pages()
        while self._launches.is_oldest_done:
            self._launches.collect_oldest()
            worked = True
        self._cache.free_deferred_pages()
        worked |= self._start()
        while len(self._launches) < MAX_LAUNCHES and self._launch():
            worked = True
        return worked

    def holds(self, page_id: int) -> bool:
        return any(job.handle is not None and page_id in job.handle.page_ids for job in self.running)

    def _prefetch(self, job: Job) -> None:
        if not job.is_prefetched:
            job.is_prefetched = True
            self._tier.prefetch(job.key, job.token_ids, job.namespace)

    def _end_prefetch(self, job: Job) -> None:
        if job.is_prefetched:
            job.is_prefetched = False
            hits = self._tier.end(job.key)
            counts = self._worker.world.counts
            counts["tokens hit in host"] += hits.host
            counts["tokens hit on disk"] += hits.disk

    def _start(self) -> bool:
        worked = False
        for job in self.queued[:NUM_PREFETCHED]:
            self._prefetch(job)
        for job in list(self.queued):
            if self._tier.is_loading(job.key):
                continue
            handle = self._cache.acquire_pages(
                job.token_ids,
                len(job.token_ids) + 1,
                max_cached_len=len(job.token_ids) - 1,
                namespace=job.namespace,
                num_reserved=len(self.running),
            )
            if handle is None:
                break
            self._end_prefetch(job)
            job.begin(handle)
            self.queued.remove(job)
            self.running.append(job)
            self.running.sort(key=lambda job: job.number)
            worked = True
        return worked

    def _launch(self) -> bool:
        decoding = self._grow()
        prompts = [job for job in self.running if job.is_prefilling][:1]
        decoded = SimPart(decoding, 1, self._collect) if decoding else None
        prompt = SimPart(prompts, CHUNK, self._collect) if prompts else None
        parts = [part for part in (decoded, prompt) if part is not None]
        if not parts:
            return False
        for part in parts:
            part.begin()
        forward = SimForward([extension for part in parts for extension in part.extensions()])
        self._launches.add(forward, decoded, prompt)
        self._worker.forwards.append(forward)
        for part in parts:
            part.launched(forward)
            for job in part.jobs:
                job.num_launches += 1
        for job in prompts:
            assert job.handle is not None
            sequence = job.sequence
            self._cache.cache_pages(job.handle, sequence.token_ids, sequence.cached_len, after=[forward])
        return True

    def _grow(self) -> list[Job]:
        batch = []
        for job in [job for job in self.running if job.needs_step]:
            if job not in self.running:
                continue
            assert job.handle is not None
            while not self._cache.grow_pages(job.handle, job.sequence.cached_len + 1):
                if len(self._launches):
                    # The running forward passes may free pages.
                    return []
                if self._tier.yields_pages():
                    self._worker.world.counts["growth waits"] += 1
                    break
                self._worker.check_nothing_yields()
                victims = self.running[1:]
                if not victims:
                    break
                self._give_back(victims[-1])
                batch = [other for other in batch if other is not victims[-1]]
                if victims[-1] is job:
                    break
            else:
                batch.append(job)
        return batch

    def _give_back(self, job: Job) -> None:
        self._worker.world.counts["given back"] += 1
        self.running.remove(job)
        self._release(job)
        job.attempt += 1
        job.token_ids = list(job.sequence.token_ids)
        self.queued.insert(0, job)

    def _collect(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.num_launches -= 1
            if job not in self.running or job.num_launches or job.sequence.remaining_len:
                continue
            token_ids = job.sequence.token_ids
            token_ids.append(job.whole_ids[len(token_ids)])
            if len(token_ids) == len(job.whole_ids):
                self.running.remove(job)
                self._release(job)
                job.ended = True
                self._worker.world.counts["finished"] += 1

    def _release(self, job: Job) -> None:
        assert job.handle is not None
        in_use = self._launches.using(job.handle.table_id)
        token_ids = job.sequence.token_ids
        num_computed = min(job.sequence.cached_len, len(token_ids) - 1)
        self._cache.cache_pages(job.handle, token_ids, num_computed, after=in_use)
        self._cache.release_pages(job.handle, after=in_use)
        job.handle = None
