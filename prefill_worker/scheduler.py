"""What a prefill worker computes next: whole prompts in chunks, in the order of a policy."""

import logging
import math
from collections.abc import Callable, Sequence

from tandem.engine.base import EngineBase
from tandem.engine.config import MAX_PREFILL_BATCH_SIZE
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.token_sequence import TokenSequence
from tandem.lifecycle import now_ns
from tandem.messages import (
    Abort,
    Failed,
    FirstToken,
    Prefill,
    PrefillDeferred,
    Progress,
    PromptScored,
    ResetCache,
    WorkerStats,
)
from tandem.prefill_worker.base import Handover
from tandem.prefill_worker.budget import PromptBudget, PromptRest, WholeChunks
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.forward import PromptChunks
from tandem.prefill_worker.job import PrefillJob
from tandem.prefill_worker.pages import PromptPages
from tandem.prefill_worker.policies.table import PREFILL_POLICIES
from tandem.prefill_worker.queued_request import PagesInWork, QueuedRequest
from tandem.prefill_worker.waiting import WaitingRequests
from tandem.recording import HANDOVERS, Recorder
from tandem.request_ids import router_of
from tandem.worker.base import ForwardScheduler, Outbox
from tandem.worker.events import Event, FromRouter, RouterLost
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.grammar_failure import grammar_failure

logger = logging.getLogger(__name__)

# Copies and forwards that have completed are looked for again so soon.
POLL_S = 0.0002
# While this thread does something else it looks for them all the time, and tells of them so often at most: telling
# takes it longer than looking.
TELL_S = 0.0005
# The device runs so many forwards, or has them before it, at most.
MAX_LAUNCHED = 2
# The wait for pages doubles so often at most.
MAX_DOUBLINGS = 3


class PrefillScheduler(ForwardScheduler):
    """A queue of requests, the jobs being computed, and the jobs waiting to be handed over.

    A job holds pages for its whole prompt from its start to its end, and always before the decode worker is asked for
    any: whoever holds a lease can finish.

    With an asynchronous engine forwards overlap: the next one is launched behind the one that runs, and no step waits
    for either, so that handovers go on meanwhile. A forward's pages are in the tree from its launch on, for whatever is
    launched later on this engine; they are shipped when it has completed.
    """

    def __init__(
        self,
        engine: EngineBase,
        cache: CacheManager,
        handover: Handover,
        outbox: Outbox,
        config: PrefillConfig,
        clock: Callable[[], float],
        recorder: Recorder | None = None,
        pages: PromptPages | None = None,
        budget: PromptBudget | None = None,
        timer: ForwardTimer | None = None,
    ) -> None:
        """
        Args:
            pages: how prompts get theirs; None: as in a worker that does nothing else.
            budget: of each forward; None: config.chunk_size.
            timer: of all that the engine computes; None: nobody else has it compute anything.
        """
        super().__init__(engine, cache, recorder, timer or ForwardTimer(engine.pool.device.type, clock))
        self._handover = handover
        self._pages = pages or PromptPages(cache)
        self._outbox = outbox
        self._config = config
        self._budget = budget or WholeChunks(config.chunk_size)
        self._clock = clock
        self._overlaps = config.overlap and engine.is_asynchronous
        self._waiting = WaitingRequests(cache, PREFILL_POLICIES.load(config.schedule)())
        self._in_work = PagesInWork()
        self._computing: list[PrefillJob] = []
        # The prefill of these jobs is done, and they wait to be handed over, each until the time beside it.
        self._handing_over: dict[tuple[str, int], tuple[PrefillJob, float]] = {}
        self._prefix_cached_tokens = 0
        self._told_at = -math.inf
        self._composed_at = 0.0

    @property
    def chunk_size(self) -> int:
        """Tokens of a forward at most."""
        return self._config.chunk_size

    @property
    def has_prompts(self) -> bool:
        """Whether there is a prompt of which not everything has been launched."""
        return bool(self._waiting) or any(job.sequence.remaining_len for job in self._computing)

    @property
    def num_running(self) -> int:
        return len(self._computing) + len(self._handing_over)

    def receive(self, event: Event) -> None:
        if isinstance(event, FromRouter):
            if isinstance(event.message, Prefill):
                constraint = self._engine.constraint(event.message.sampling.grammar)
                self._waiting.enqueue(event.message, constraint, event.received_ns)
            elif isinstance(event.message, Abort):
                self._abort(event.message.request_id, event.message.attempt)
            elif isinstance(event.message, ResetCache):
                self._cache.drop_cached_pages()
        elif isinstance(event, RouterLost):
            self._waiting.drop_all_of(event.router)
            for job in self._jobs():
                if router_of(job.request.request_id) == event.router:
                    self._end_job(job, reported=False)
        self._handover.receive(event)

    @property
    def launched(self) -> list[PromptChunks]:
        """Those whose results have not been taken, in the order of their launch. None are left when a step returns
        unless forwards overlap."""
        return [part for part in self._launches.parts if isinstance(part, PromptChunks)]

    def hands_over_here(self) -> bool:
        """Whether a prompt ends with what has been launched that the same engine is to decode."""
        return any(self._handover.continues_here(job.request) for f in self.launched for job in f.handed_over)

    def step(self) -> bool:
        worked = self.settle()
        chunks = self.compose()
        if chunks is not None:
            self.launch(chunks)
        return worked or chunks is not None

    def settle(self) -> bool:
        """Goes on with what has come to an end; returns whether that was a forward. Where steps are decoded beside
        prompts, it is one with prompts in it, or before one with some."""
        self._cache.free_deferred_pages()
        self._settle_handovers()
        self._recorder.lap("settle")
        worked = False
        while self._launches.is_oldest_done and self.launched:
            self._launches.collect_oldest()
            worked = True
        return worked

    def compose(self) -> PromptChunks | None:
        """What is to be computed next, if anything may be launched now. Nothing may happen to its jobs before."""
        if len(self.launched) >= MAX_LAUNCHED:
            return None
        begun = next((job for job in self._computing if job.sequence.remaining_len), None)
        order = self._waiting.start_order() if begun is None else None
        budget = self._next_budget(begun, order)
        self._start_jobs(budget, order)
        chunks = self._next_chunks(budget)
        if not chunks:
            return None
        if logger.isEnabledFor(logging.DEBUG):
            self._log_batch(chunks)
        # The lease requests of new jobs go out: their answers hide behind this forward.
        self._outbox.flush()
        self._recorder.lap("compose")
        self._composed_at = self._clock()
        return PromptChunks(chunks, self._note_launched, self._collect)

    def launch(self, chunks: PromptChunks) -> None:
        self._engine.launch(prompts=chunks, meanwhile=self.go_on_meanwhile)
        if not self._overlaps:
            self.collect_launched()

    def next_deadline(self) -> float | None:
        if self.launched or self._handover.is_copying or self._waiting.is_compiling:
            return self._clock() + POLL_S
        return min((deadline for _, deadline in self._handing_over.values()), default=None)

    def own_stats(self) -> WorkerStats:
        return WorkerStats(
            num_queued=len(self._waiting),
            num_running=self.num_running,
            prefix_cached_tokens=self._prefix_cached_tokens,
            shipped=self._handover.shipped,
        )

    def _next_budget(self, begun: PrefillJob | None, order: Sequence[QueuedRequest] | None) -> int:
        """Tokens of the next forward, at most; 0: there is nothing to compute.

        Args:
            begun: the prompt that is gone on with, if there is one.
            order: of those that may begin, if there is none.
        """
        if begun is not None:
            rest = PromptRest(begun.sequence.cached_len, begun.sequence.remaining_len)
            return self._budget.num_tokens(lambda: rest)
        return self._budget.num_tokens(lambda: self._rest_of(order[0])) if order else 0

    def _rest_of(self, queued: QueuedRequest) -> PromptRest:
        """What a request would have to compute here if it began now."""
        num_tokens, num_cached = len(queued.token_ids), 0
        if not queued.computes_all:
            num_pages = len(self._cache.peek(queued.token_ids, queued.request.cache_namespace))
            num_cached = num_pages * self._cache.page_size
        return PromptRest(num_cached, num_tokens - num_cached)

    def _jobs(self) -> list[PrefillJob]:
        return [*self._computing, *(job for job, _ in self._handing_over.values())]

    def _settle_handovers(self) -> None:
        for result in self._handover.take_results():
            self._free_job(result.job)
            if result.job.first_token is not None:
                self._recorder.add(
                    HANDOVERS,
                    "handover",
                    result.job.first_token_time_ns,
                    (result.job.request.request_id,),
                    end_ns=result.ended_ns,
                    detail=result.failure,
                )
            if result.failure:
                self._fail(result.job, result.failure)
        now = self._clock()
        for job, deadline in list(self._handing_over.values()):
            if now >= deadline:
                # Nobody is at fault: the router may find a decode worker with pages. It ends the attempt by its Abort,
                # here and there: until then the request keeps its place in the decode worker's line. What was computed
                # stays cached.
                self._handing_over[job.key] = job, math.inf
                self._outbox.to_router(PrefillDeferred(*job.key))

    def _start_jobs(self, budget: int, order: Sequence[QueuedRequest] | None) -> None:
        """Locks pages for queued requests as long as the next forward has tokens to spare. Args: order: in which these
        begin; None: nobody has asked yet."""
        self._pages.begin_pass()
        budget -= sum(job.sequence.remaining_len for job in self._computing)
        if budget <= 0 or not self._waiting:
            return
        for queued in self._waiting.start_order() if order is None else order:
            if budget <= 0 or self._pages.is_short:
                break
            if self._pages.must_wait(queued):
                continue
            request = queued.request
            if refusal := self._handover.refusal(request):
                self._waiting.drop(queued)
                self._outbox.to_router(Failed(*queued.key, refusal))
                continue
            if failure := grammar_failure(*queued.key, queued.constraint):
                self._waiting.drop(queued)
                self._outbox.to_router(failure)
                continue
            if self._must_wait_for_prefix(queued):
                continue
            handle = self._pages.acquire(queued)
            if handle is not None:
                budget -= self._start(queued, handle)
                self.go_on_meanwhile()

    def _must_wait_for_prefix(self, queued: QueuedRequest) -> bool:
        """Whether a job is computing pages that this request needs next: it holds nothing until those are in the cache
        or the job has ended, and then computes only its own."""
        if queued.computes_all:
            return False
        num_cached_pages = len(self._cache.peek(queued.token_ids, queued.request.cache_namespace))
        num_shared = self._in_work.num_next_in_work(queued.prefix_ids, num_cached_pages)
        return num_shared * self._cache.page_size >= self._config.min_shared_tokens

    def _start(self, queued: QueuedRequest, handle: PageHandle) -> int:
        """Makes a job of a request that has its pages; returns the tokens to compute."""
        request = queued.request
        self._waiting.dequeue(queued)
        sequence = TokenSequence(
            queued.token_ids,
            len(request.prompt_ids),
            handle.page_ids,
            cached_len=handle.cached_len,
            sampling=request.sampling,
            constraint=queued.constraint,
            table_id=handle.table_id,
        )
        pages_to_compute = queued.prefix_ids[handle.num_shared :]
        job = PrefillJob(
            request, sequence, handle, now_ns(), received_ns=queued.received_ns, pages_to_compute=pages_to_compute
        )
        self._in_work.enter_work(pages_to_compute)
        self._computing.append(job)
        self._prefix_cached_tokens += min(handle.cached_len, len(request.prompt_ids))
        self._handover.begin(job)
        return sequence.remaining_len

    def _leave_work(self, job: PrefillJob, num_pages: int) -> None:
        """The next `num_pages` full pages of a job are no longer in work."""
        self._in_work.leave_work(job.pages_to_compute[:num_pages])
        del job.pages_to_compute[:num_pages]

    def _next_chunks(self, budget: int) -> list[tuple[PrefillJob, int]]:
        """The jobs of the next forward, and how many tokens it is to compute of each."""
        chunks: list[tuple[PrefillJob, int]] = []
        for job in self._computing:
            if len(chunks) == MAX_PREFILL_BATCH_SIZE:
                break
            # None are left of a job whose last chunk is in flight.
            num_tokens = min(budget, job.sequence.remaining_len)
            if num_tokens:
                chunks.append((job, num_tokens))
                budget -= num_tokens
        return chunks

    def _note_launched(self, launched: PromptChunks) -> None:
        num_attended = 0
        for job, num_tokens in zip(launched.jobs, launched.num_tokens, strict=True):
            num_cached = job.sequence.cached_len - num_tokens
            num_attended += num_tokens * num_cached + num_tokens * num_tokens // 2
        self._timer.prompts_launched(self._composed_at, sum(launched.num_tokens), num_attended)
        if self._recorder.is_on:
            self._record_launch(launched)
        for job in launched.jobs:
            handle, sequence = job.handle, job.sequence
            assert handle is not None
            num_shared = handle.num_shared
            # This is done before the next batch is built, so that its requests find these pages; duplicates are still
            # written.
            self._cache.cache_pages(handle, sequence.token_ids, sequence.cached_len, after=[launched.output])
            self._leave_work(job, handle.num_shared - num_shared)
        self._recorder.lap("cache")

    def go_on_meanwhile(self) -> None:
        """Handovers do not wait for what else this thread does, which may take longer than they do."""
        now = self._clock()
        if now >= self._told_at + TELL_S and self._handover.is_copying:
            self._recorder.look()
            self._handover.go_on()
            # First tokens that wait to be told of leave with what has come of it.
            if self._outbox.flush():
                self._told_at = now

    def _record_launch(self, launched: PromptChunks) -> None:
        numbers = {"batch_size": launched.num_decoded} if launched.num_decoded else {}
        self._recorder.launched(
            "mixed" if launched.num_decoded else "prefill",
            launched.output.done,
            launched.output.duration_s if self._engine.is_asynchronous else None,
            [*(job.request.request_id for job in launched.jobs), *launched.joining_ids],
            [*launched.num_tokens, *[1] * len(launched.joining_ids)],
            num_tokens=sum(launched.num_tokens),
            **numbers,
        )

    def _collect(self, launched: PromptChunks) -> None:
        """Waits for a forward and passes on what it gave."""
        self._outbox.flush()
        going_on = launched.collect()
        self._timer.prompts_ended(is_mixed=launched.num_decoded > 0)
        self._recorder.look()
        for job in going_on:
            if failure := grammar_failure(*job.key, job.sequence.constraint):
                self._outbox.to_router(failure)
                self._end_job(job, reported=True)
                continue
            if job.prompt_logprobs is not None:
                self._outbox.to_router(PromptScored(*job.key, job.prompt_logprobs))
            if job.first_token is not None:
                self._finish_prefill(job, job.first_token)
            elif not job.has_told_start:
                # Of a prompt of one chunk FirstToken says it soon enough.
                job.has_told_start = True
                self._outbox.to_router(Progress(*job.key, job.moments))
            self._handover.advance(job)
            self.go_on_meanwhile()
        self._outbox.flush()
        self._recorder.lap("collect")

    def _log_batch(self, chunks: list[tuple[PrefillJob, int]]) -> None:
        cached_lens = [job.sequence.cached_len for job, _ in chunks if job.is_new]
        logger.debug(
            "prefill batch: %d new sequences, %d new tokens, %d cached tokens, %d running, %d queued",
            len(cached_lens),
            sum(num_tokens for _, num_tokens in chunks),
            sum(cached_lens),
            self.num_running,
            len(self._waiting),
        )

    def _finish_prefill(self, job: PrefillJob, first_token: int) -> None:
        request = job.request
        index = len(request.output_ids)
        job.finish_reason = request.sampling.finish_reason(first_token, index + 1)
        self._computing.remove(job)
        # Each attempt waits for twice as long as the one before. A line may move more slowly than the first one waits,
        # and who leaves it again and again, for that of another decode worker, would never come to its head.
        timeout_s = self._config.grant_timeout_s * 2 ** min(request.attempt, MAX_DOUBLINGS)
        self._handing_over[job.key] = (job, self._clock() + timeout_s)
        assert job.handle is not None
        cached_len = job.handle.cached_len
        num_tokens = len(job.sequence.token_ids)
        self._outbox.to_router(
            FirstToken(
                request.request_id,
                request.attempt,
                index,
                first_token,
                job.finish_reason,
                cached_len,
                self._cache.num_pages_for(num_tokens) - self._cache.num_pages_for(cached_len),
                job.moments,
                job.logprobs,
            )
        )

    def _abort(self, request_id: str, attempt: int) -> None:
        if self._waiting.drop_attempt(request_id, attempt):
            return
        for job in self._jobs():
            if job.key == (request_id, attempt):
                self._end_job(job, reported=True)
                return

    def _end_job(self, job: PrefillJob, *, reported: bool) -> None:
        """Ends a job that was not handed over."""
        self._handover.cancel(job, reported=reported)
        self._free_job(job)

    def _free_job(self, job: PrefillJob) -> None:
        """The one place where a job's pages are given back."""
        self._leave_work(job, len(job.pages_to_compute))
        if job in self._computing:
            self._computing.remove(job)
        self._handing_over.pop(job.key, None)
        if job.handle is not None:
            in_use = self._launches.using(job.handle.table_id)
            self._cache.release_pages(job.handle, after=[*job.copies, *in_use])
            job.handle = None

    def _fail(self, job: PrefillJob, reason: str) -> None:
        self._outbox.to_router(Failed(*job.key, reason))
