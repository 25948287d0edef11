"""Scheduler of a decode worker: grants leases, runs decode steps, ends finished requests."""

import bisect
import logging
import math
from collections.abc import Callable, Sequence

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.draft_depth import DraftDepth
from tandem.decode_worker.draft_policy import DraftPolicy
from tandem.decode_worker.drafters.shared import SharedOutputs
from tandem.decode_worker.drafting import Drafting, StepDrafts
from tandem.decode_worker.growth import PageGrowth
from tandem.decode_worker.job import DecodeJob
from tandem.decode_worker.lease import Lease
from tandem.decode_worker.leases import LeaseBook
from tandem.decode_worker.model_drafting import ModelDrafting
from tandem.decode_worker.overlap_price import OverlapPrice, StepTime
from tandem.decode_worker.pacing import StepPace
from tandem.decode_worker.speculation import parse_speculation
from tandem.decode_worker.step import DecodeStep
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.launch_list import ForwardPart
from tandem.engine.token_sequence import TokenSequence
from tandem.kvtransfer.events import ReceiverLinkEvent
from tandem.lifecycle import (
    COMMITTED,
    DECODE_STARTED,
    LAST_TOKEN,
    LEASE_GRANTED,
    SECOND_TOKEN,
    SHIP_STARTED,
)
from tandem.messages import (
    Abort,
    Admit,
    Finished,
    GaveBack,
    Moment,
    NamespaceOwners,
    Progress,
    ResetCache,
    TierHits,
    TokenEvent,
    Tokens,
    WorkerStats,
)
from tandem.recording import HANDOVERS, Recorder
from tandem.request_ids import router_of
from tandem.sampling_params import TokenLogprobs
from tandem.worker.adapter_uses import NO_USE, AdapterUses, adapter_failure
from tandem.worker.base import ForwardScheduler, Outbox
from tandem.worker.events import Event, FromRouter, RouterLost
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.grammar_failure import grammar_failure
from tandem.worker.page_tier import NoTier, PageTier

logger = logging.getLogger(__name__)

# Poll interval for grammars, for prompts of a due step, and for pages that copies hold, in seconds.
POLL_S = 0.001


class DecodeScheduler(ForwardScheduler):
    """Schedules the running requests, by age and priority, and the leases of future ones.

    On an asynchronous engine steps overlap: the next step is launched shortly before the running one ends, while the
    previous tokens are sent. A request that ends by a stop token is in one step too many; that token is dropped.
    Drafts follow known tokens. So a step with drafts waits for the previous tokens, and the next one for its own.
    """

    def __init__(
        self,
        engine: EngineBase,
        cache: CacheManager,
        outbox: Outbox,
        config: DecodeConfig,
        clock: Callable[[], float],
        recorder: Recorder | None = None,
        timer: ForwardTimer | None = None,
        *,
        tier: PageTier | None = None,
        prefill_worker_id: str = "",
        adapters: AdapterUses | None = None,
    ) -> None:
        """
        Args:
            timer: the engine's timer; None if this is its only scheduler.
            tier: the tier below the pool; None if there is none.
            prefill_worker_id: this worker's name if it prefills too; then a prompt that it prefills is not prefetched
                again for its lease.
            adapters: the engine's; None if this is its only scheduler.
        """
        super().__init__(engine, cache, outbox, clock, recorder, timer, adapters)
        self._config = config
        self._overlaps = config.overlap and engine.is_asynchronous
        self._clock = clock
        self._pace = StepPace(clock)
        self._shared_outputs = SharedOutputs() if config.speculation_shared else None
        self._drafting = self._new_drafting()
        # Since when no decode step is in flight; None if nothing was decoded before.
        self._idle_since: float | None = None
        self._running: list[DecodeJob] = []
        tier = tier or NoTier()
        self._leases = LeaseBook(
            cache,
            outbox,
            config,
            clock,
            self._start_committed,
            self._recorder,
            tier=tier,
            prefill_worker_id=prefill_worker_id,
            lack_of=self._lack_of,
        )
        # Jobs that wait for their adapter.
        self._adapterless: list[DecodeJob] = []
        # Jobs whose prompt pages enter the tree after their first step's launch.
        self._uncached: list[DecodeJob] = []
        self._num_given_back = 0
        self._growth = PageGrowth(cache, tier, config.max_batch_size, self._collect_early, self._give_back)

    def _new_drafting(self) -> StepDrafts | None:
        """Raises ValueError: the engine computes no drafts, or has no drafter, and the configuration asks for it."""
        speculation, engine = parse_speculation(self._config.speculation), self._engine
        source, has_policy = speculation.source, speculation.has_policy or speculation.is_by_model
        if not source or (speculation.has_policy and not engine.max_drafts):
            return None
        if not engine.max_drafts:
            raise ValueError(
                f"`speculation` {self._config.speculation} is for attention that computes several rows of a sequence "
                "in a decode step, and this model's does not on this device: use `speculation` off"
            )
        policy = None
        objective_s = self._config.itl_objective_s
        if has_policy:
            price = OverlapPrice(self._pace) if self._overlaps else None
            if speculation.is_by_model:
                depth = DraftDepth(self._timer, objective_s, engine.draft_costs, price)
                return ModelDrafting(source, engine, self._cache, depth, self._clock)
            policy = DraftPolicy(self._timer, objective_s, engine.draft_costs, price)
        return Drafting(source, engine, self._cache, policy, self._shared_outputs, self._clock)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_reserved(self) -> int:
        """Pages left free for running requests to grow into."""
        return len(self._running) if self._drafting is None else self._drafting.num_reserved(self._running)

    @property
    def _in_flight(self) -> DecodeStep | None:
        return next((part for part in reversed(self._launches.parts) if isinstance(part, DecodeStep)), None)

    @property
    def leases(self) -> LeaseBook:
        return self._leases

    def answer_leases(self) -> None:
        """Grants leases, leaving each running request a page to grow."""
        self._leases.answer_requests(self.num_reserved)

    def receive(self, event: Event) -> None:
        super().receive(event)
        if isinstance(event, FromRouter):
            if isinstance(event.message, Admit):
                # Compile a new grammar, and load the adapter, while the prompt is computed.
                self._engine.constraint(event.message.sampling.grammar, client=event.message.client)
                self._adapters.expect(event.message.adapter)
                self._leases.admit_request(event.message)
            elif isinstance(event.message, Abort):
                self._abort(event.message.request_id, event.message.attempt)
            elif isinstance(event.message, ResetCache):
                self._cache.drop_cached_pages()
                if self._shared_outputs is not None:
                    self._shared_outputs.drop()
            elif isinstance(event.message, NamespaceOwners) and self._shared_outputs is not None:
                self._shared_outputs.set_owners(event.message.owners)
        elif isinstance(event, RouterLost):
            self._leases.abort_all_attempts_of(event.router)
            for job in list(self._running):
                if router_of(job.request_id) == event.router:
                    self._end_job(job)
        elif isinstance(event, ReceiverLinkEvent):
            self._leases.receive(event)

    def step(self) -> bool:
        self.settle()
        if not self.is_due():
            self.cache_adopted()
            self.answer_leases()
            self._recorder.lap("grant")
            return False
        previous = self._in_flight
        self.begin_composing()
        step = self.compose()
        if step is not None:
            self.launch(step)
        elif previous is not None and previous.is_mixed and not previous.output.done():
            # No step follows: poll for the end of the mixed step instead of blocking.
            self.cache_adopted()
            return False
        else:
            self._collect_steps()
        self.cache_adopted()
        return previous is not None or step is not None

    def is_due(self, *, with_prompts: bool = False) -> bool:
        previous = self._in_flight
        return previous is None or self._pace.is_due(with_prompts=with_prompts) or previous.output.done()

    def begin_composing(self) -> None:
        self._pace.composing()

    def settle(self) -> None:
        self.settle_memory()
        self._leases.start_arrived()
        self._recorder.lap("settle")

    def compose(self, *, with_drafts: bool = True) -> DecodeStep | None:
        """Composes the next step, or None. Its jobs must not change before the launch."""
        self._hold_adapters()
        drafting = self._drafting if with_drafts else None
        if drafting is not None and self._in_flight is not None:
            may_run = [job for job in self._running if job.needs_step][: self._config.max_batch_size]
            if drafting.awaits_tokens(may_run):
                self._collect_early()
        # Growth goes before new leases.
        jobs = self._growth.grow(self._running)
        self.answer_leases()
        if not jobs:
            self._timer.nothing_decoded()
            self._idle_since = None
            return None
        new_jobs = [job for job in jobs if job.is_new]
        for job in new_jobs:
            job.stamp(DECODE_STARTED)
        if logger.isEnabledFor(logging.DEBUG):
            self._log_batch(len(jobs), new_jobs)
        if drafting is not None and self._in_flight is None:
            # Leases that wait for pages go before drafts.
            drafting.draft(jobs, self._running, may_grow=not self._leases.num_waiting)
        self._recorder.lap("compose")
        return DecodeStep(jobs, new_jobs, self._in_flight, self._note_launched, self._collect)

    def launch(
        self, step: DecodeStep, prompts: ForwardPart | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Launches a step, handles earlier outputs while it runs, and samples its tokens."""
        self._pace.launching()
        idle_since = self._idle_since if self._in_flight is None else None
        step.overlaps = self._in_flight is not None
        self._engine.launch(decoded=step, prompts=prompts, meanwhile=meanwhile)
        if idle_since is not None and self._overlaps and self._drafting is not None:
            step.idle_s = self._clock() - idle_since
        self._launches.collect_all_but(1)
        # Grammars depend on the tokens just collected.
        step.sample()
        self._recorder.lap("sample")
        if not self._overlaps or step.num_drafted:
            self.collect_launched()

    def next_deadline(self, *, with_prompts: bool = False) -> float | None:
        deadline = self._leases.next_deadline()
        if self._in_flight is None:
            # Jobs here wait only for grammars, copies and other ranks, which send no event: poll.
            is_lagging = self._growth.waits_for_copies or self._launches.is_lagging
            waits = self._adapterless or any(job.sequence.constraint is not None for job in self._running)
            if is_lagging or waits:
                return self._clock() + POLL_S
            return deadline
        now, due = self._clock(), self._pace.due(with_prompts=with_prompts)
        if due <= now:
            # The due step is still empty: its prompts wait for pages. Do not delay a decode-only step.
            alone = self._pace.due()
            due = min(now + POLL_S, alone) if alone > now else now + POLL_S
        return due if deadline is None else min(deadline, due)

    def earliest_end(self) -> float:
        """Returns the earliest plausible end of the oldest step in flight; -inf if there is none."""
        return -math.inf if self._in_flight is None else self._pace.earliest_end()

    def own_stats(self) -> WorkerStats:
        hits = self._leases.hits
        return WorkerStats(
            num_queued=self._leases.num_waiting,
            num_running=len(self._running),
            prefix_cached_tokens=hits.num_cached,
            prefix_host_tokens=hits.loaded.host,
            prefix_disk_tokens=hits.loaded.disk,
            prefix_peer_tokens=hits.loaded.peer,
            num_given_back=self._num_given_back,
            num_leases_expired=self._leases.num_expired,
            drafted=() if self._drafting is None else self._drafting.counts,
        )

    def adopt(
        self,
        admit: Admit,
        handle: PageHandle,
        *,
        first_token: int,
        logprobs: tuple[TokenLogprobs, ...],
        finish_reason: str,
        num_pages_shipped: int,
        prefill_cached_len: int,
        prefill_loaded: TierHits,
        moments: Sequence[Moment],
    ) -> None:
        """Takes over a prefilled request and its pages.

        Args:
            handle: pages with the KV of all tokens but `first_token`.
            finish_reason: not empty if the first token ends the request; then no step runs.
        """
        token_ids = [*admit.prompt_ids, *admit.output_ids, first_token]
        num_computed = len(token_ids) - 1
        if finish_reason:
            in_use = self._launches.using(handle.table_id)
            self._cache.cache_pages(handle, token_ids, num_computed, after=in_use)
            self._cache.release_pages(handle, after=in_use)
            self._leases.look_again()
            return
        job = DecodeJob(
            admit.request_id,
            admit.attempt,
            admit.arrival_ns,
            admit.priority,
            TokenSequence(
                token_ids,
                len(admit.prompt_ids),
                handle.page_ids,
                cached_len=num_computed,
                sampling=admit.sampling,
                constraint=self._engine.constraint(admit.sampling.grammar, admit.output_ids, admit.client),
                table_id=handle.table_id,
            ),
            handle,
            num_prior_outputs=len(admit.output_ids),
            unsent=[first_token],
            unsent_logprobs=list(logprobs),
            cached_len=handle.cached_len,
            num_pages_shipped=num_pages_shipped,
            prefill_cached_len=prefill_cached_len,
            prefill_loaded=prefill_loaded,
            moments=[*moments],
            client=admit.client,
            cache_namespace=admit.cache_namespace,
            adapter=self._adapters.begin(admit.adapter, admit.cache_namespace),
        )
        job.stamp(COMMITTED)
        if job.adapter is not NO_USE:
            self._adapterless.append(job)
        # By age over all attempts and priority: the order of growth, whose first is never given back.
        bisect.insort(self._running, job, key=lambda j: j.queue_key)
        self._uncached.append(job)

    def cache_adopted(self) -> None:
        """Inserts new jobs' prompt pages into the tree. At 3 us a page, it must delay neither their first step nor
        tokens."""
        if not self._uncached:
            return
        self._outbox.flush()
        adopted, self._uncached = self._uncached, []
        for job in adopted:
            if not job.has_ended:
                self._cache_computed(job)
        self._leases.look_again()
        self._recorder.lap("cache")

    def find_running(self, request_id: str, attempt: int) -> DecodeJob | None:
        return next((job for job in self._running if (job.request_id, job.attempt) == (request_id, attempt)), None)

    def is_oldest(self, job: DecodeJob) -> bool:
        """Returns whether a running job is the first by age and priority, which is never given back."""
        return self._running[0] is job

    def share_computed(self, job: DecodeJob) -> list[Completion]:
        """Inserts a running job's computed pages into the tree. Returns launches that may still write them."""
        if job in self._uncached:
            self._uncached.remove(job)
        return self._cache_computed(job)

    def give_back_moved(self, job: DecodeJob) -> None:
        """Gives back a job without a token in flight, whose pages are at another worker."""
        self._end_with(job, GaveBack(job.request_id, job.attempt, is_move=True))

    def _lack_of(self, admit: Admit) -> str:
        """Returns what a moving stream would have to wait for here: "grammar", "adapter" or ""."""
        constraint = self._engine.constraint(admit.sampling.grammar, client=admit.client)
        if constraint is not None and (not constraint.is_ready or constraint.error):
            return "grammar"
        return "" if self._adapters.has(admit.adapter) else "adapter"

    def _hold_adapters(self) -> None:
        """Gives waiting jobs their adapters' slots, and ends jobs whose adapter cannot be used."""
        waiting, self._adapterless = self._adapterless, []
        for job in waiting:
            if job.has_ended:
                continue
            if job.adapter.try_hold():
                job.sequence.adapter_slot = job.adapter.slot
            elif failure := adapter_failure(job.request_id, job.attempt, job.adapter):
                self._outbox.to_router(failure)
                self._end_job(job)
            else:
                self._adapterless.append(job)

    def _cache_computed(self, job: DecodeJob) -> list[Completion]:
        """Inserts computed pages into the tree, without the last token, whose KV is not computed yet. Returns launches
        that may still use the pages."""
        in_use = self._launches.using(job.handle.table_id)
        token_ids = job.sequence.token_ids
        self._cache.cache_pages(job.handle, token_ids, min(job.sequence.cached_len, len(token_ids) - 1), after=in_use)
        return in_use

    def take_admitted(self, request_id: str, attempt: int) -> Admit | None:
        return self._leases.take_admitted(request_id, attempt)

    def _start_committed(self, lease: Lease) -> None:
        committed = lease.committed
        moments = [Moment(LEASE_GRANTED, lease.granted_ns)]
        if committed.ship_started_ns:
            moments.append(Moment(SHIP_STARTED, committed.ship_started_ns))
        self.adopt(
            lease.admit,
            lease.handle,
            first_token=committed.first_token,
            logprobs=committed.logprobs,
            finish_reason=committed.finish_reason,
            num_pages_shipped=committed.num_pages,
            prefill_cached_len=committed.prefill_cached_len,
            prefill_loaded=committed.prefill_loaded,
            moments=moments,
        )

    def _collect_early(self) -> bool:
        """Collects the steps in flight while the next is composed. Returns whether there were any."""
        if self._in_flight is None:
            return False
        self._collect_steps()
        self._cache.free_deferred_pages()
        self._pace.composing()
        return True

    def _give_back(self, job: DecodeJob) -> None:
        self._num_given_back += 1
        self._end_with(job, GaveBack(job.request_id, job.attempt))

    def _end_with(self, job: DecodeJob, gave_back: GaveBack) -> None:
        self._send_tokens([job])
        self._outbox.to_router(gave_back)
        self._leases.mark_ended(job.request_id, job.attempt)
        self._end_job(job)

    def _collect_steps(self) -> None:
        while self._in_flight is not None:
            self._launches.collect_oldest()

    def _note_launched(self, step: DecodeStep) -> None:
        num_context = sum([sequence.device_len for sequence in step.sequences])
        self._timer.step_launched(len(step.jobs) + step.num_drafted, num_context, is_mixed=step.is_mixed)
        if self._overlaps and not step.num_drafted:
            self._pace.launched(self._timer.expected_s if step.is_mixed else None)
        if self._recorder.is_on:
            self._record_launch(step)

    def _record_launch(self, step: DecodeStep) -> None:
        for job in step.new_jobs:
            times = {moment.name: moment.time_ns for moment in job.moments}
            self._recorder.add(
                HANDOVERS, "wait for step", times[COMMITTED], (job.request_id,), end_ns=times[DECODE_STARTED]
            )
        if step.is_mixed:
            return
        self._recorder.launched(
            "decode",
            step.output.done,
            step.output.duration_s if self._engine.is_asynchronous else None,
            [job.request_id for job in step.new_jobs],
            batch_size=len(step.jobs),
            num_running=len(self._running),
        )

    def _collect(self, step: DecodeStep) -> None:
        """Waits for a step and handles its tokens."""
        self._outbox.flush()
        if self._overlaps and not step.num_drafted:
            was_running = not step.output.done()
            self._pace.ended(step.output.duration_s(), was_running=was_running)
        jobs = []
        finished: list[tuple[DecodeJob, str]] = []
        going_on = step.collect()
        known_before, self._idle_since = self._idle_since, self._clock()
        new_jobs = set(step.new_jobs)
        if self._drafting is not None:
            for job, num_right in step.num_accepted.items():
                self._drafting.checked(job, num_right)
            num_accepted = sum(step.num_accepted.values())
            self._drafting.timed(
                StepTime(
                    None if known_before is None else self._idle_since - known_before,
                    len(step.jobs),
                    len(step.jobs) + num_accepted,
                    has_drafts=step.num_drafted > 0,
                    overlaps=step.overlaps,
                    has_prompts=self._timer.has_prompts,
                )
            )
            # The launch counted all drafts.
            self._engine.counters.output_tokens_computed -= step.num_drafted - num_accepted
        self._timer.step_ended(idle_s=step.idle_s)
        self._recorder.look()
        for job in going_on:
            if failure := grammar_failure(job.request_id, job.attempt, job.sequence.constraint):
                self._outbox.to_router(failure)
                self._end_job(job)
                continue
            jobs.append(job)
            if job in new_jobs:
                job.stamp(SECOND_TOKEN)
                self._outbox.to_router(Progress(job.request_id, job.attempt, job.take_moments()))
            if reason := job.finish_reason():
                finished.append((job, reason))
        self._send_tokens(jobs)
        for job, reason in finished:
            self._finish(job, reason)
        self._pace.collected(self._clock() - self._idle_since)
        self._recorder.lap("collect")

    def _log_batch(self, num_tokens: int, new_jobs: Sequence[DecodeJob]) -> None:
        logger.debug(
            "decode batch: %d new sequences, %d new tokens, %d cached tokens, %d running, %d queued",
            len(new_jobs),
            num_tokens,
            sum(job.cached_len for job in new_jobs),
            len(self._running),
            self._leases.num_waiting,
        )

    def _send_tokens(self, jobs: Sequence[DecodeJob]) -> None:
        events = tuple(
            TokenEvent(
                job.request_id,
                job.attempt,
                job.num_outputs - len(job.unsent),
                tuple(job.unsent),
                tuple(job.unsent_logprobs),
            )
            for job in jobs
            if job.unsent
        )
        if events:
            self._outbox.to_router(Tokens(events))
        for job in jobs:
            job.unsent.clear()
            job.unsent_logprobs.clear()

    def _finish(self, job: DecodeJob, reason: str) -> None:
        job.stamp(LAST_TOKEN)
        if self._shared_outputs is not None:
            self._shared_outputs.add(job.cache_namespace, job.sequence.token_ids[job.sequence.prompt_len :])
        self._end_job(job)
        self._outbox.to_router(
            Finished(
                job.request_id,
                job.attempt,
                reason,
                job.num_outputs,
                job.cached_len,
                job.num_pages_shipped,
                job.take_moments(),
                job.prefill_cached_len,
                job.prefill_loaded,
                job.num_drafted,
                job.num_accepted,
            )
        )

    def _abort(self, request_id: str, attempt: int) -> None:
        for job in self._running:
            if (job.request_id, job.attempt) == (request_id, attempt):
                self._end_job(job)
                break
        self._leases.abort_attempt(request_id, attempt)

    def _end_job(self, job: DecodeJob) -> None:
        """Every end of a running job goes through this method. Its computed pages stay cached."""
        self._running.remove(job)
        job.has_ended = True
        job.adapter.end()
        self._cache.release_pages(job.handle, after=self._cache_computed(job))
