"""What a decode worker does next: grants leases, runs every request it has one token further, ends those that are
done."""

import bisect
import logging
from collections.abc import Callable, Sequence

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.job import DecodeJob
from tandem.decode_worker.lease import Lease
from tandem.decode_worker.leases import LeaseBook
from tandem.decode_worker.pacing import StepPace
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
    Progress,
    ResetCache,
    TokenEvent,
    Tokens,
    WorkerStats,
)
from tandem.recording import HANDOVERS, Recorder
from tandem.request_ids import router_of
from tandem.sampling_params import TokenLogprobs
from tandem.worker.base import ForwardScheduler, Outbox
from tandem.worker.events import Event, FromRouter, RouterLost
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.grammar_failure import grammar_failure

logger = logging.getLogger(__name__)

# So soon is looked again whether grammars are compiled, and whether there is something for a step that is due.
POLL_S = 0.001


class DecodeScheduler(ForwardScheduler):
    """The running requests, by age and priority, and the leases of those to come.

    With an asynchronous engine steps overlap: while the device runs one, the tokens of the one before are passed on,
    and shortly before its end the next one is launched behind it. That a request ends by its length is known before
    that; one that ends by a stop token has been launched once too often, and what comes of it is dropped.
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
    ) -> None:
        """Args: timer: of all that the engine computes; None: nobody else has it compute anything."""
        super().__init__(engine, cache, recorder, timer or ForwardTimer(engine.pool.device.type, clock))
        self._outbox = outbox
        self._config = config
        self._overlaps = config.overlap and engine.is_asynchronous
        self._clock = clock
        self._pace = StepPace(clock)
        self._running: list[DecodeJob] = []
        self._leases = LeaseBook(cache, outbox, config, clock, self._start_committed, self._recorder)
        # Their prompts' pages are in the tree only when the step that they joined has been launched.
        self._uncached: list[DecodeJob] = []
        self._num_given_back = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def _in_flight(self) -> DecodeStep | None:
        """The step that was launched last, if its tokens are not known yet."""
        return next((part for part in reversed(self._launches.parts) if isinstance(part, DecodeStep)), None)

    @property
    def leases(self) -> LeaseBook:
        return self._leases

    def answer_leases(self) -> None:
        """Grants what can be granted, leaving running requests the pages that they grow into."""
        self._leases.answer_requests(num_reserved=len(self._running))

    def receive(self, event: Event) -> None:
        if isinstance(event, FromRouter):
            if isinstance(event.message, Admit):
                # A grammar that is new here is compiled while the prompt is computed.
                self._engine.constraint(event.message.sampling.grammar)
                self._leases.admit_request(event.message)
            elif isinstance(event.message, Abort):
                self._abort(event.message.request_id, event.message.attempt)
            elif isinstance(event.message, ResetCache):
                self._cache.drop_cached_pages()
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
            # Nothing is to follow it, and it may take long: its end is looked for, and nobody else waits for it.
            self.cache_adopted()
            return False
        else:
            self._collect_steps()
        self.cache_adopted()
        return previous is not None or step is not None

    def is_due(self, *, with_prompts: bool = False) -> bool:
        """Whether the next step is to be composed now. Args: with_prompts: as of StepPace."""
        previous = self._in_flight
        return previous is None or self._pace.is_due(with_prompts=with_prompts) or previous.output.done()

    def begin_composing(self) -> None:
        """What the host does from here on, until a step is launched, is for that step."""
        self._pace.composing()

    def settle(self) -> None:
        """Goes on with what has come to an end."""
        self._cache.free_deferred_pages()
        self._leases.start_arrived()
        self._recorder.lap("settle")

    def compose(self) -> DecodeStep | None:
        """The next step, with a page for each of its tokens; None if nothing is to be decoded. Nothing may happen to
        its jobs before it is launched."""
        # Growth goes before new leases.
        jobs = self._grow()
        self.answer_leases()
        if not jobs:
            self._timer.nothing_decoded()
            return None
        new_jobs = [job for job in jobs if job.is_new]
        for job in new_jobs:
            job.stamp(DECODE_STARTED)
        if logger.isEnabledFor(logging.DEBUG):
            self._log_batch(len(jobs), new_jobs)
        self._recorder.lap("compose")
        return DecodeStep(jobs, new_jobs, self._in_flight, self._note_launched, self._collect)

    def launch(
        self, step: DecodeStep, prompts: ForwardPart | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Launches a step, passes on what was launched before it while it runs, and has its tokens chosen."""
        self._pace.launching()
        self._engine.launch(decoded=step, prompts=prompts, meanwhile=meanwhile)
        self._launches.collect_all_but(1)
        # What may come next by a grammar follows from the tokens that have just been collected. The forward is running
        # meanwhile.
        step.sample()
        self._recorder.lap("sample")
        if not self._overlaps:
            self.collect_launched()

    def next_deadline(self, *, with_prompts: bool = False) -> float | None:
        """Args: with_prompts: whether the next step is to have some."""
        deadline = self._leases.next_deadline()
        if self._in_flight is None:
            # Nothing else keeps them from a step. That a grammar is compiled by now is no reason to sleep.
            if any(job.sequence.constraint is not None for job in self._running):
                return self._clock() + POLL_S
            return deadline
        now, due = self._clock(), self._pace.due(with_prompts=with_prompts)
        if due <= now:
            # What is due has nothing in it yet: prompts may wait for pages. A step without them is not to be late.
            alone = self._pace.due()
            due = min(now + POLL_S, alone) if alone > now else now + POLL_S
        return due if deadline is None else min(deadline, due)

    def own_stats(self) -> WorkerStats:
        return WorkerStats(
            num_queued=self._leases.num_waiting,
            num_running=len(self._running),
            prefix_cached_tokens=self._leases.prefix_cached_tokens,
            num_given_back=self._num_given_back,
            num_leases_expired=self._leases.num_expired,
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
        moments: Sequence[Moment],
    ) -> None:
        """Takes over a prefilled request with its pages; its first token goes on from here.

        Args:
            handle: holds the KV of every token of the request but `first_token`.
            logprobs: the first token's, if asked for.
            finish_reason: not empty if the first token ends the request: no step is run then.
            moments: what has happened to it on its way here.
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
                constraint=self._engine.constraint(admit.sampling.grammar),
                table_id=handle.table_id,
            ),
            handle,
            num_prior_outputs=len(admit.output_ids),
            unsent=[first_token],
            unsent_logprobs=list(logprobs),
            cached_len=handle.cached_len,
            num_pages_shipped=num_pages_shipped,
            prefill_cached_len=prefill_cached_len,
            moments=[*moments],
        )
        job.stamp(COMMITTED)
        # They stand by age over all attempts, and priority: that is the order of growth, and the first is never given
        # back.
        bisect.insort(self._running, job, key=lambda j: j.queue_key)
        self._uncached.append(job)

    def cache_adopted(self) -> None:
        """Puts the pages of prompts that have come into the tree. Their first steps do not wait for that, which takes 3
        microseconds a page, nor do tokens."""
        if not self._uncached:
            return
        self._outbox.flush()
        adopted, self._uncached = self._uncached, []
        for job in adopted:
            if not job.has_ended:
                self._cache_computed(job)
        self._leases.look_again()
        self._recorder.lap("cache")

    def _cache_computed(self, job: DecodeJob) -> list[Completion]:
        """Puts what is computed of a job into the tree. The last token has no KV yet, or a step in flight computes it,
        and a page may not be shared before that has run: it stays out. Returns what has been launched with the job's
        pages and may still run."""
        in_use = self._launches.using(job.handle.table_id)
        token_ids = job.sequence.token_ids
        self._cache.cache_pages(job.handle, token_ids, min(job.sequence.cached_len, len(token_ids) - 1), after=in_use)
        return in_use

    def take_admitted(self, request_id: str, attempt: int) -> Admit | None:
        """Hands out an admitted request that is adopted without a lease."""
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
            moments=moments,
        )

    def _grow(self) -> list[DecodeJob]:
        """Gives each job of the next batch the page its next token needs, in order. When pages run out, of the requests
        with the lowest priority the one that is cheapest to redo is given back, but never the first in order: so one
        always finishes."""
        batch: list[DecodeJob] = []
        # It is empty in nearly every step: looking for a job here costs less than among all that run.
        given_back: list[DecodeJob] = []
        for job in [job for job in self._running if job.needs_step][: self._config.max_batch_size]:
            if job in given_back:
                continue
            while not self._cache.grow_pages(job.handle, job.sequence.cached_len + 1):
                if self._in_flight is not None:
                    # What ends with it may leave pages enough, and pages of a job in it are not free before.
                    self._collect_steps()
                    self._cache.free_deferred_pages()
                    self._pace.composing()
                    return self._grow()
                victims = self._running[1:]
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

    def _give_back(self, job: DecodeJob) -> None:
        self._send_tokens([job])
        self._outbox.to_router(GaveBack(job.request_id, job.attempt))
        self._num_given_back += 1
        self._leases.mark_ended(job.request_id, job.attempt)
        self._end_job(job)

    def _collect_steps(self) -> None:
        """Waits for the step in flight, if there is one, and passes on what it gave, and what was launched before."""
        while self._in_flight is not None:
            self._launches.collect_oldest()

    def _note_launched(self, step: DecodeStep) -> None:
        num_context = sum([sequence.device_len for sequence in step.sequences])
        self._timer.step_launched(len(step.jobs), num_context)
        if self._overlaps:
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
            # It is recorded with its prompts.
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
        """Waits for a step, passes its tokens on and ends the jobs that are done."""
        self._outbox.flush()
        if self._overlaps:
            was_running = not step.output.done()
            self._pace.ended(step.output.duration_s(), was_running=was_running)
        jobs = []
        finished: list[tuple[DecodeJob, str]] = []
        going_on = step.collect()
        self._timer.step_ended()
        self._recorder.look()
        for job in going_on:
            if failure := grammar_failure(job.request_id, job.attempt, job.sequence.constraint):
                self._outbox.to_router(failure)
                self._end_job(job)
                continue
            jobs.append(job)
            if job.num_outputs == job.num_prior_outputs + 2:
                job.stamp(SECOND_TOKEN)
                self._outbox.to_router(Progress(job.request_id, job.attempt, job.take_moments()))
            if reason := job.finish_reason():
                finished.append((job, reason))
        self._send_tokens(jobs)
        for job, reason in finished:
            self._finish(job, reason)
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
            )
        )

    def _abort(self, request_id: str, attempt: int) -> None:
        for job in self._running:
            if (job.request_id, job.attempt) == (request_id, attempt):
                self._end_job(job)
                break
        self._leases.abort_attempt(request_id, attempt)

    def _end_job(self, job: DecodeJob) -> None:
        """The one place where a running job's pages are given back; what it computed stays for reuse."""
        self._running.remove(job)
        job.has_ended = True
        self._cache.release_pages(job.handle, after=self._cache_computed(job))
