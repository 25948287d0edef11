"""What a prefill worker computes next: whole prompts in chunks, first come first served."""

from collections import deque
from collections.abc import Callable

from tandem.config import PrefillConfig
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.request import Sequence
from tandem.lifecycle import FIRST_TOKEN, PREFILL_STARTED, now_ns
from tandem.messages import Abort, Failed, FirstToken, Moment, Prefill, WorkerStats
from tandem.worker.base import Handover, Outbox, PrefillJob, Scheduler
from tandem.worker.events import Event, FromRouter, RouterLost


class PrefillScheduler(Scheduler):
    """A queue of requests, the jobs being computed, and the jobs waiting to be handed over.

    A job holds pages for its whole prompt from its start to its end, and always before the decode worker is asked for
    any: whoever holds a lease can finish.
    """

    def __init__(
        self,
        engine: EngineBase,
        cache: CacheManager,
        handover: Handover,
        outbox: Outbox,
        config: PrefillConfig,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._handover = handover
        self._outbox = outbox
        self._config = config
        self._clock = clock
        self._queue: deque[Prefill] = deque()
        self._computing: list[PrefillJob] = []
        # Prefill done, not handed over yet; with the time at which waiting ends.
        self._handing_over: dict[tuple[str, int], tuple[PrefillJob, float]] = {}

    def receive(self, event: Event) -> None:
        if isinstance(event, FromRouter):
            if isinstance(event.message, Prefill):
                self._queue.append(event.message)
            elif isinstance(event.message, Abort):
                self._abort(event.message.request_id, event.message.attempt)
        elif isinstance(event, RouterLost):
            self._queue.clear()
            for job in self._jobs():
                self._end(job)
        self._handover.receive(event)

    def step(self) -> bool:
        self._cache.poll()
        self._settle_handovers()
        self._start_jobs()
        batch = self._next_batch()
        if batch is None:
            return False
        self._run(batch)
        return True

    def next_deadline(self) -> float | None:
        return min((deadline for _, deadline in self._handing_over.values()), default=None)

    def stats(self) -> WorkerStats:
        return WorkerStats(
            num_queued=len(self._queue),
            num_running=len(self._computing) + len(self._handing_over),
            num_total_pages=self._cache.num_pages,
            num_free_pages=self._cache.num_free_pages,
            num_cached_pages=self._cache.num_cached_pages,
            num_locked_pages=self._cache.num_locked_pages,
            num_leased_pages=self._cache.num_leased_pages,
            prompt_tokens_computed=self._engine.counters.prompt_tokens_computed,
            output_tokens_computed=self._engine.counters.output_tokens_computed,
            pages_shipped=self._handover.num_pages_shipped,
        )

    def check_integrity(self) -> str:
        return self._cache.check_integrity()

    def _jobs(self) -> list[PrefillJob]:
        return [*self._computing, *(job for job, _ in self._handing_over.values())]

    def _settle_handovers(self) -> None:
        for result in self._handover.poll():
            self._forget(result.job)
            if result.failure:
                self._fail(result.job, result.failure)
        now = self._clock()
        for job, deadline in list(self._handing_over.values()):
            if now >= deadline:
                self._end(job)
                self._fail(job, "the decode worker had no room for the prompt in time")

    def _start_jobs(self) -> None:
        """Locks pages for queued requests as long as the next forward has tokens to spare."""
        budget = self._config.chunk_size - sum(job.sequence.remaining_len for job in self._computing)
        while self._queue and budget > 0:
            request = self._queue[0]
            if refusal := self._handover.refusal(request):
                self._queue.popleft()
                self._outbox.to_router(Failed(request.request_id, request.attempt, refusal, retryable=True))
                continue
            token_ids = [*request.prompt_ids, *request.output_ids]
            # At least one token is computed, to have logits.
            handle = self._cache.acquire(token_ids, len(token_ids), max_cached_len=len(token_ids) - 1)
            if handle is None:
                break
            self._queue.popleft()
            sequence = Sequence(token_ids, len(request.prompt_ids), handle.page_ids, cached_len=handle.cached_len)
            job = PrefillJob(request, sequence, handle, started_ns=now_ns())
            self._computing.append(job)
            self._handover.start(job)
            budget -= sequence.remaining_len

    def _next_batch(self) -> Batch | None:
        budget = self._config.chunk_size
        sequences = []
        for job in self._computing:
            if budget == 0:
                break
            num_tokens = min(budget, job.sequence.remaining_len)
            job.sequence.extend(num_tokens)
            sequences.append(job.sequence)
            budget -= num_tokens
        return Batch("prefill", sequences) if sequences else None

    def _run(self, batch: Batch) -> None:
        jobs = self._computing[: len(batch.sequences)]
        # The lease requests of new jobs: their answers hide behind this forward.
        self._outbox.flush()
        next_tokens = iter(self._engine.forward(batch).token_ids())
        for job in jobs:
            sequence = job.sequence
            needs_logits = sequence.needs_logits
            sequence.complete_extend()
            assert job.handle is not None
            # Before the next batch is built, so that its requests find these pages.
            self._cache.insert(job.handle, sequence.token_ids, sequence.cached_len)
            if needs_logits:
                self._finish_prefill(job, next(next_tokens))
            self._handover.advance(job)

    def _finish_prefill(self, job: PrefillJob, token_id: int) -> None:
        request = job.request
        index = len(request.output_ids)
        job.first_token = token_id
        job.first_token_time_ns = now_ns()
        job.finish_reason = request.sampling.finish_reason(token_id, index + 1)
        self._computing.remove(job)
        self._handing_over[job.key] = (job, self._clock() + self._config.grant_timeout_s)
        assert job.handle is not None
        cached_len = job.handle.cached_len
        num_tokens = len(job.sequence.token_ids)
        self._outbox.to_router(
            FirstToken(
                request.request_id,
                request.attempt,
                index,
                token_id,
                job.finish_reason,
                cached_len,
                self._cache.num_pages_for(num_tokens) - self._cache.num_pages_for(cached_len),
                (Moment(PREFILL_STARTED, job.started_ns), Moment(FIRST_TOKEN, job.first_token_time_ns)),
            )
        )

    def _abort(self, request_id: str, attempt: int) -> None:
        for request in self._queue:
            if (request.request_id, request.attempt) == (request_id, attempt):
                self._queue.remove(request)
                return
        for job in self._jobs():
            if job.key == (request_id, attempt):
                self._end(job)
                return

    def _end(self, job: PrefillJob) -> None:
        """Ends a job that was not handed over."""
        self._handover.cancel(job)
        self._forget(job)

    def _forget(self, job: PrefillJob) -> None:
        """The one place where a job's pages are given back."""
        if job in self._computing:
            self._computing.remove(job)
        self._handing_over.pop(job.key, None)
        if job.handle is not None:
            self._cache.release(job.handle, after=job.copies)
            job.handle = None

    def _fail(self, job: PrefillJob, reason: str) -> None:
        self._outbox.to_router(Failed(*job.key, reason, retryable=True))
