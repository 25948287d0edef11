"""Scheduler of a prefill worker: computes whole prompts in chunks, in a policy's order."""

import logging
import math
from collections.abc import Callable, Iterator
from itertools import chain, islice

from tandem.engine.base import EngineBase
from tandem.engine.config import MAX_PREFILL_BATCH_SIZE
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.token_sequence import TokenSequence
from tandem.lifecycle import now_ns
from tandem.messages import (
    Abort,
    Embedded,
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
from tandem.prefill_worker.pacing import PromptPace
from tandem.prefill_worker.pages import PromptPages
from tandem.prefill_worker.policies.table import PREFILL_POLICIES
from tandem.prefill_worker.queued_request import PagesInWork, QueuedRequest
from tandem.prefill_worker.waiting import WaitingRequests
from tandem.recording import HANDOVERS, Recorder
from tandem.request_ids import router_of
from tandem.worker.adapter_uses import AdapterUses, adapter_failure
from tandem.worker.base import ForwardScheduler, Outbox
from tandem.worker.events import Event, FromRouter, RouterLost
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.grammar_failure import grammar_failure
from tandem.worker.page_tier import PageTier
from tandem.worker.prefix_hits import PrefixHits

logger = logging.getLogger(__name__)

# Poll interval for completed copies and forward passes, in seconds.
POLL_S = 0.0002
# Poll interval of prompts whose stored pages are coming, in seconds.
LOADING_POLL_S = 0.001
# Minimum interval between messages of a busy thread, in seconds: sending takes longer than polling.
TELL_S = 0.0005
# Maximum number of launched forward passes.
MAX_LAUNCHED = 2
# Maximum number of doublings of the grant timeout.
MAX_DOUBLINGS = 3


class PrefillScheduler(ForwardScheduler):
    """Schedules queued requests, jobs being computed, and jobs waiting for their handover.

    A job locks pages for its whole prompt before it requests a lease, so a job with a lease can always finish. A prompt
    that is only embedded needs no lease: its job ends with its last chunk.

    On an asynchronous engine forward passes overlap, and no step waits for one, so handovers continue. Pages enter the
    tree at their launch, for later launches here, and are shipped after it has completed.
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
        tier: PageTier | None = None,
        adapters: AdapterUses | None = None,
    ) -> None:
        """
        Args:
            pages: page allocation; None for a pool that only prefill uses.
            budget: token budget of a forward pass; None for chunk_size.
            timer: the engine's timer; None if this is its only scheduler.
            tier: the tier below the pool; None if there is none.
            adapters: the engine's; None if this is its only scheduler.
        """
        super().__init__(engine, cache, outbox, clock, recorder, timer, adapters)
        self._handover = handover
        self._pages = pages or PromptPages(cache)
        self._config = config
        self._budget = budget or WholeChunks(config.chunk_size)
        self._clock = clock
        self._overlaps = config.overlap and engine.is_asynchronous
        self._waiting = WaitingRequests(
            cache, PREFILL_POLICIES.load(config.schedule)(), tier, self._must_wait_for_prefix
        )
        self._in_work = PagesInWork()
        self._computing: list[PrefillJob] = []
        # Jobs waiting for their handover, each with its deadline.
        self._handing_over: dict[tuple[str, int], tuple[PrefillJob, float]] = {}
        self._hits = PrefixHits()
        self._told_at = -math.inf
        self._composed_at = 0.0
        self._pace = PromptPace(clock)

    @property
    def chunk_size(self) -> int:
        return self._config.chunk_size

    @property
    def has_prompts(self) -> bool:
        """Whether any prompt is not fully launched."""
        return bool(self._waiting) or any(job.sequence.remaining_len for job in self._computing)

    @property
    def num_running(self) -> int:
        return len(self._computing) + len(self._handing_over)

    def receive(self, event: Event) -> None:
        super().receive(event)
        if isinstance(event, FromRouter):
            if isinstance(event.message, Prefill):
                prefill = event.message
                constraint = self._engine.constraint(prefill.sampling.grammar, prefill.output_ids, prefill.client)
                adapter = self._adapters.begin(prefill.adapter, prefill.cache_namespace)
                self._waiting.enqueue(prefill, constraint, event.received_ns, adapter)
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
        """Launched chunks without collected results, in launch order. Empty after a step without overlap."""
        return [part for part in self._launches.parts if isinstance(part, PromptChunks)]

    def hands_over_here(self) -> bool:
        """Returns whether a launched pass completes a prompt that this engine will decode."""
        return any(self._handover.continues_here(job.request) for f in self.launched for job in f.handed_over)

    def step(self) -> bool:
        worked = self.settle()
        chunks = self.compose()
        if chunks is not None:
            self.launch(chunks)
        return worked or chunks is not None

    def settle(self) -> bool:
        """Handles handovers and completed forward passes. Returns whether a pass was collected, in a mixed worker maybe
        a decode step before prompts."""
        self.settle_memory()
        self._settle_handovers()
        self._recorder.lap("settle")
        worked = False
        while self._launches.is_oldest_done and self.launched:
            self._launches.collect_oldest()
            worked = True
        return worked

    def compose(self) -> PromptChunks | None:
        """Composes the next chunks, or None. Their jobs must not change before the launch."""
        if len(self.launched) >= MAX_LAUNCHED:
            return None
        self._pages.begin_pass()
        taken: list[PrefillJob] = []
        sizes = self._budget.fit(self._take_prompts(taken))
        chunks = [(job, num_tokens) for job, num_tokens in zip(taken, sizes, strict=True) if num_tokens]
        if not chunks:
            return None
        if logger.isEnabledFor(logging.DEBUG):
            self._log_batch(chunks)
        # Send new lease requests now: the answers arrive during this forward pass.
        self._outbox.flush()
        self._recorder.lap("compose")
        self._composed_at = self._clock()
        return PromptChunks(chunks, self._note_launched, self._collect)

    def launch(self, chunks: PromptChunks) -> None:
        self._engine.launch(prompts=chunks, meanwhile=self.go_on_meanwhile)
        if not self._overlaps:
            self.collect_launched()

    def next_deadline(self, *, step_end: float = -math.inf) -> float | None:
        """
        Args:
            step_end: earliest plausible end of the oldest decode step in flight, prompts in it included.
        """
        deadlines = [deadline for _, deadline in self._handing_over.values()]
        now = self._clock()
        if self._handover.is_copying or self._waiting.is_compiling or self._launches.is_lagging:
            deadlines.append(now + POLL_S)
        elif self.launched:
            # CUDA reports no end without a thread that blocks or a pause of its stream: poll, but only near the end.
            is_step = not isinstance(self._launches.parts[0], PromptChunks)
            earliest = step_end if is_step else self._pace.earliest_end()
            deadlines.append(max(now + POLL_S, earliest))
        if self._waiting.is_loading or self._waiting.waits_for_adapter:
            deadlines.append(now + LOADING_POLL_S)
        return min(deadlines, default=None)

    def own_stats(self) -> WorkerStats:
        return WorkerStats(
            num_queued=len(self._waiting),
            num_queued_tokens=self._waiting.num_tokens + sum(job.sequence.remaining_len for job in self._computing),
            num_running=self.num_running,
            prefix_cached_tokens=self._hits.num_cached,
            prefix_host_tokens=self._hits.loaded.host,
            prefix_disk_tokens=self._hits.loaded.disk,
            prefix_peer_tokens=self._hits.loaded.peer,
            shipped=self._handover.shipped,
        )

    def _take_prompts(self, taken: list[PrefillJob]) -> Iterator[PromptRest]:
        """Yields the prompts of the next forward pass, and appends each to `taken`: moving streams first, then started
        ones. A queued one is started when it is taken."""
        begun = [job for job in self._computing if job.sequence.remaining_len]
        begun.sort(key=lambda job: not job.request.is_move)
        moves, others = self._start_queued(self._waiting.moves), self._start_queued(self._waiting.start_order)
        for job in islice(chain(moves, begun, others), MAX_PREFILL_BATCH_SIZE):
            taken.append(job)
            yield PromptRest(job.sequence.cached_len, job.sequence.remaining_len)

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
                # No failure: the router may know a decode worker with free pages. It sends Abort to both workers; until
                # then the request keeps its place in the queue for leases.
                self._handing_over[job.key] = job, math.inf
                self._outbox.to_router(PrefillDeferred(*job.key))

    def _start_queued(self, order: Callable[[], list[QueuedRequest]]) -> Iterator[PrefillJob]:
        """Yields queued requests as jobs, with pages locked for the whole prompt."""
        for queued in order():
            if self._pages.is_short:
                break
            if self._pages.must_wait(queued):
                continue
            request = queued.request
            if request.embedding is None and (refusal := self._handover.refusal(request)):
                self._waiting.drop(queued)
                self._outbox.to_router(Failed(*queued.key, refusal))
                continue
            if failure := grammar_failure(*queued.key, queued.constraint):
                self._waiting.drop(queued)
                self._outbox.to_router(failure)
                continue
            # In this order: pages that are being computed need no load.
            if self._must_wait_for_prefix(queued) or self._waiting.must_wait_for_load(queued):
                continue
            if not queued.adapter.try_hold():
                if failure := adapter_failure(*queued.key, queued.adapter):
                    self._waiting.drop(queued)
                    self._outbox.to_router(failure)
                continue
            handle = self._pages.acquire(queued)
            if handle is None:
                queued.adapter.let_go()
            else:
                job = self._start(queued, handle)
                self.go_on_meanwhile()
                yield job

    def _must_wait_for_prefix(self, queued: QueuedRequest) -> bool:
        """Returns whether a job is computing this request's next pages, which it then waits for without holding
        anything."""
        # Mostly nothing is in work, and a look at a long prefix in each turn would delay decode steps.
        if queued.computes_all or not self._in_work:
            return False
        num_cached_pages = len(self._cache.peek(queued.token_ids, queued.request.cache_namespace))
        num_shared = self._in_work.num_next_in_work(queued.prefix_ids, num_cached_pages)
        return num_shared * self._cache.page_size >= self._config.min_shared_tokens

    def _start(self, queued: QueuedRequest, handle: PageHandle) -> PrefillJob:
        request = queued.request
        loaded = self._hits.add(handle.cached_len, len(request.prompt_ids), self._waiting.dequeue(queued))
        sequence = TokenSequence(
            queued.token_ids,
            len(request.prompt_ids),
            handle.page_ids,
            cached_len=handle.cached_len,
            sampling=request.sampling,
            constraint=queued.constraint,
            table_id=handle.table_id,
            embedding=request.embedding,
            adapter_slot=queued.adapter.slot,
        )
        pages_to_compute = queued.prefix_ids[handle.num_shared :]
        job = PrefillJob(
            request,
            sequence,
            handle,
            now_ns(),
            received_ns=queued.received_ns,
            loaded=loaded,
            pages_to_compute=pages_to_compute,
            adapter=queued.adapter,
        )
        self._in_work.enter_work(pages_to_compute)
        self._computing.append(job)
        if request.embedding is None:
            self._handover.begin(job)
        return job

    def _leave_work(self, job: PrefillJob, num_pages: int) -> None:
        self._in_work.leave_work(job.pages_to_compute[:num_pages])
        del job.pages_to_compute[:num_pages]

    def _note_launched(self, launched: PromptChunks) -> None:
        num_attended = 0
        for job, num_tokens in zip(launched.jobs, launched.num_tokens, strict=True):
            num_cached = job.sequence.cached_len - num_tokens
            num_attended += num_tokens * num_cached + num_tokens * num_tokens // 2
        self._timer.prompts_launched(self._composed_at, sum(launched.num_tokens), num_attended)
        if self._overlaps and not launched.num_decoded:
            self._pace.launched(self._composed_at, self._timer.expected_prompt_s)
        if self._recorder.is_on:
            self._record_launch(launched)
        for job in launched.jobs:
            handle, sequence = job.handle, job.sequence
            assert handle is not None
            num_shared = handle.num_shared
            # Before the next batch is composed, whose requests find these pages. Duplicates are still written.
            self._cache.cache_pages(handle, sequence.token_ids, sequence.cached_len, after=[launched.output])
            self._leave_work(job, handle.num_shared - num_shared)
        self._recorder.lap("cache")

    def go_on_meanwhile(self) -> None:
        """Continues handovers while this thread is busy with longer work."""
        now = self._clock()
        if now >= self._told_at + TELL_S and self._handover.is_copying:
            self._recorder.look()
            self._handover.go_on()
            # Also sends waiting first tokens.
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
        self._outbox.flush()
        going_on = launched.collect()
        if self._overlaps and not launched.num_decoded:
            self._pace.ended(launched.output.duration_s())
        self._timer.prompts_ended(is_mixed=launched.num_decoded > 0)
        self._recorder.look()
        for job in going_on:
            if failure := grammar_failure(*job.key, job.sequence.constraint):
                self._outbox.to_router(failure)
                self._end_job(job, reported=True)
                continue
            if job.embedding is not None:
                self._finish_embedding(job, job.embedding)
                continue
            if job.prompt_logprobs is not None:
                self._outbox.to_router(PromptScored(*job.key, job.prompt_logprobs))
            if job.first_token is not None:
                self._finish_prefill(job, job.first_token)
            elif not job.has_told_start:
                # For a prompt of one chunk, FirstToken reports it.
                job.has_told_start = True
                self._outbox.to_router(Progress(*job.key, job.moments))
            if job.request.embedding is None:
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
        job.adapter.end()
        # The timeout doubles with each attempt: a request that leaves slow queues again and again would never reach a
        # head.
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
                job.loaded,
            )
        )

    def _finish_embedding(self, job: PrefillJob, embedding: bytes) -> None:
        assert job.handle is not None
        cached_len = job.handle.cached_len
        num_pages = self._cache.num_pages_for(len(job.sequence.token_ids)) - self._cache.num_pages_for(cached_len)
        self._outbox.to_router(Embedded(*job.key, embedding, cached_len, num_pages, job.moments, job.loaded))
        self._free_job(job)

    def _abort(self, request_id: str, attempt: int) -> None:
        if self._waiting.drop_attempt(request_id, attempt):
            return
        for job in self._jobs():
            if job.key == (request_id, attempt):
                self._end_job(job, reported=True)
                return

    def _end_job(self, job: PrefillJob, *, reported: bool) -> None:
        if job.request.embedding is None:
            self._handover.cancel(job, reported=reported)
        self._free_job(job)

    def _free_job(self, job: PrefillJob) -> None:
        """Every release of a job's pages goes through this method."""
        self._leave_work(job, len(job.pages_to_compute))
        if job in self._computing:
            self._computing.remove(job)
        self._handing_over.pop(job.key, None)
        job.adapter.end()
        if job.handle is not None:
            in_use = self._launches.using(job.handle.table_id)
            self._cache.release_pages(job.handle, after=[*job.copies, *in_use])
            job.handle = None

    def _fail(self, job: PrefillJob, reason: str) -> None:
        self._outbox.to_router(Failed(*job.key, reason))
