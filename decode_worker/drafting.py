"""Speculation: drafts of a decode step's requests, and their counts."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tandem.decode_worker import draft_policy
from tandem.decode_worker.draft_acceptance import AcceptanceMeans
from tandem.decode_worker.draft_counts import DraftCounts
from tandem.decode_worker.draft_policy import DraftPolicy
from tandem.decode_worker.drafters.base import Drafter
from tandem.decode_worker.drafters.shared import SharedLookup, SharedOutputs
from tandem.decode_worker.drafters.table import DRAFTERS
from tandem.decode_worker.job import DecodeJob, JobDrafts
from tandem.decode_worker.overlap_price import StepTime
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Drafted

# Drafts of a request in a step at most, without a policy.
MAX_DRAFTS = 4
# Share of a step without drafts for searches, while drafts do not pay. They take requests in turn.
SEARCH_SHARE = 0.02
# Weight of a step in the mean time of a search.
SEARCH_WEIGHT = 1 / 16
# For all grammars of a step's drafts, in seconds of a processor. Beyond it, later ones get none.
MAX_GRAMMAR_CPU_S = 0.01

Proposal: TypeAlias = tuple[DecodeJob, JobDrafts, Sequence[int]]


class StepDrafts(ABC):
    """Gives the jobs of a step drafts, within their pages and grammars, and counts them by source."""

    def __init__(self, source: str, engine: EngineBase, cache: CacheManager) -> None:
        """Args: source: the usual one, counted from the start."""
        self._source = source
        self._engine = engine
        self._cache = cache
        self._counts = {source: DraftCounts()}
        self._grammar_cpu_s = 0.0

    @abstractmethod
    def awaits_tokens(self, jobs: Sequence[DecodeJob]) -> bool:
        """Returns whether a step waits for the tokens in flight, to have drafts behind them, instead of overlapping.

        Args:
            jobs: of the step. The host knows all their tokens but the last.
        """

    @abstractmethod
    def draft(self, jobs: Sequence[DecodeJob], running: Sequence[DecodeJob], *, may_grow: bool) -> None:
        """
        Args:
            jobs: of the step, each with a page for its next token. The host knows all their tokens.
            may_grow: whether drafts may take free pages.
        """

    def timed(self, step: StepTime) -> None:
        """Takes the time of a step."""
        return

    @property
    def counts(self) -> tuple[Drafted, ...]:
        """By source, since the start."""
        return tuple(counts.named(source) for source, counts in self._counts.items())

    def num_reserved(self, running: Sequence[DecodeJob]) -> int:
        """Returns the pages to leave for the next tokens of running requests. One with a spare page needs none."""
        num_pages_for = self._cache.num_pages_for
        return sum(len(job.handle.page_ids) <= num_pages_for(len(job.sequence.token_ids)) for job in running)

    def checked(self, job: DecodeJob, num_accepted: int) -> None:
        """Counts a job's drafts of a step. Called before its next drafts are proposed."""
        assert job.drafts is not None
        self._counts[job.drafts.source].checked(num_accepted)

    def _may_draft(self, job: DecodeJob) -> bool:
        """Returns whether drafts are worth a search or a pass: the job does not move, and its grammar takes some."""
        matcher = None if job.drafts is None else job.drafts.matcher
        return not job.is_moving and (matcher is None or matcher.may_pass)

    def _room(self, job: DecodeJob, num_drafts: int, num_reserved: int | None) -> int:
        """Returns how many drafts the job has pages for. Args: num_reserved: None: it gets no more pages."""
        num_cached = job.sequence.cached_len
        room = len(job.handle.page_ids) * self._cache.page_size
        if num_reserved is not None and num_cached + 1 + num_drafts > room:
            room = self._cache.grow_into_free_pages(job.handle, num_cached + 1 + num_drafts, num_reserved=num_reserved)
        return min(num_drafts, room - num_cached - 1)

    def _take(self, job: DecodeJob, of_job: JobDrafts, drafts: Sequence[int]) -> int:
        """Gives the job its drafts of the next step, as far as its grammar allows them, and returns their number."""
        if drafts and job.sequence.constraint is not None:
            drafts = self._within_grammar(job, of_job, drafts)
        if drafts:
            job.sequence.draft_ids = drafts
            self._counts.setdefault(of_job.source, DraftCounts()).drafted(len(drafts))
        return len(drafts)

    def _until_stop(self, job: DecodeJob, drafts: Sequence[int]) -> Sequence[int]:
        """Returns the drafts before the first stop token: nothing may follow one, and the row before samples it."""
        stops = job.sequence.stop_token_ids
        return next((drafts[:place] for place, draft in enumerate(drafts) if draft in stops), drafts)

    def _within_grammar(self, job: DecodeJob, of_job: JobDrafts, drafts: Sequence[int]) -> Sequence[int]:
        if self._grammar_cpu_s > MAX_GRAMMAR_CPU_S:
            return ()
        began = time.thread_time()
        sequence = job.sequence
        if of_job.matcher is None:
            of_job.matcher = self._engine.draft_matcher(sequence.sampling.grammar, job.client)
            if of_job.matcher is None:
                return ()
        outputs = sequence.token_ids[sequence.prompt_len :]
        sequence.draft_masks = of_job.matcher.check(outputs, drafts, sequence.sampling.stop_token_ids)
        self._grammar_cpu_s += time.thread_time() - began
        return drafts[: len(sequence.draft_masks)]


class Drafting(StepDrafts):
    """Proposes tokens by lookup, or by a drafter of the user's own."""

    def __init__(
        self,
        source: str,
        engine: EngineBase,
        cache: CacheManager,
        policy: DraftPolicy | None = None,
        shared: SharedOutputs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            source: a name in DRAFTERS, or a drafter's import path.
            policy: None to compute all drafts, up to MAX_DRAFTS.
            shared: outputs of other requests for lookup, with source "ngram"; None: requests learn nothing of others.
        """
        super().__init__(source, engine, cache)
        self._drafter = DRAFTERS.load(source)
        self._policy = policy
        self._means = AcceptanceMeans()
        self._shared = shared
        self._clock = clock
        # Whether drafts would have paid when all requests were last looked at, and the last sample of them.
        self._pays, self._turn = True, 0
        # Of a request, in seconds.
        self._search_s = 0.0
        self._max_drafts = min(MAX_DRAFTS if policy is None else draft_policy.MAX_DRAFTS, engine.max_drafts)

    def awaits_tokens(self, jobs: Sequence[DecodeJob]) -> bool:
        if not self._max_drafts or len(jobs) >= self._engine.max_drafted_rows:
            return False
        if self._policy is None:
            return True
        if not self._pays:
            # Searches for all might take longer than the step in flight.
            step_s = self._policy.step_s(len(jobs))
            num_turns = max(1, math.ceil(len(jobs) * self._search_s / (SEARCH_SHARE * step_s))) if step_s else 1
            self._turn = (self._turn + 1) % num_turns
            sampled = self._timed_proposals(jobs[self._turn :: num_turns])
            pays = any(self._best_counts(sampled * num_turns, jobs, num_unknown=1))
            if num_turns == 1 or not pays:
                self._pays = pays
                return pays
        self._pays = any(self._best_counts(self._timed_proposals(jobs), jobs, num_unknown=1))
        return self._pays

    def draft(self, jobs: Sequence[DecodeJob], running: Sequence[DecodeJob], *, may_grow: bool) -> None:
        num_reserved = self.num_reserved(running) if may_grow else None
        num_left = self._engine.max_drafted_rows - len(jobs)
        self._grammar_cpu_s = 0.0
        for job, of_job, drafts in self._chosen(jobs):
            room = self._room(job, min(len(drafts), max(0, num_left)), num_reserved)
            num_left -= self._take(job, of_job, drafts[:room])

    def timed(self, step: StepTime) -> None:
        if self._policy is not None:
            self._policy.timed(step)

    def _chosen(self, jobs: Sequence[DecodeJob]) -> list[Proposal]:
        """Returns the drafts to compute of each job that has any."""
        proposals = self._proposals(jobs)
        if self._policy is None or not proposals:
            return proposals
        counts = self._best_counts(proposals, jobs)
        self._pays = any(counts)
        return [
            (job, of_job, drafts[:count])
            for (job, of_job, drafts), count in zip(proposals, counts, strict=True)
            if count
        ]

    def _timed_proposals(self, jobs: Sequence[DecodeJob]) -> list[Proposal]:
        began = self._clock()
        proposals = self._proposals(jobs)
        if jobs:
            self._search_s += SEARCH_WEIGHT * ((self._clock() - began) / len(jobs) - self._search_s)
        return proposals

    def _best_counts(
        self, proposals: Sequence[Proposal], jobs: Sequence[DecodeJob], *, num_unknown: int = 0
    ) -> list[int]:
        assert self._policy is not None
        return self._policy.choose(
            [(of_job.acceptance[of_job.source], len(drafts)) for _, of_job, drafts in proposals],
            len(jobs),
            sum(job.sequence.cached_len + 1 for job in jobs),
            num_unknown=num_unknown,
        )

    def _proposals(self, jobs: Sequence[DecodeJob]) -> list[Proposal]:
        """Returns the drafts of each job that has any, before the policy."""
        proposals = []
        for job in jobs:
            sequence = job.sequence
            # The last token of an output needs no draft: the step before it samples it.
            max_tokens = min(self._max_drafts, sequence.sampling.max_tokens - job.num_outputs - 1)
            if max_tokens <= 0 or not self._may_draft(job):
                continue
            if job.drafts is None:
                job.drafts = JobDrafts(self._new_drafter(job))
            of_job = job.drafts
            were_wrong = False
            if self._policy is not None and of_job.proposed:
                sampled = sequence.token_ids[of_job.proposed_at :]
                source = of_job.source
                known = of_job.acceptance[source]
                of_job.acceptance[source] = self._means.observe(source, known, of_job.proposed, sampled)
                # Without a token since, nothing is known of them.
                were_wrong = bool(sampled) and sampled[0] != of_job.proposed[0]
            # A drafter of the user's own may propose more.
            assert of_job.drafter is not None
            proposed = of_job.drafter.propose(sequence.token_ids, max_tokens)[:max_tokens]
            of_job.source = of_job.drafter.source or self._source
            if self._policy is not None:
                of_job.acceptance.setdefault(of_job.source, self._means.usual(of_job.source))
            of_job.proposed = self._until_stop(job, proposed)
            of_job.proposed_at = len(sequence.token_ids)
            if were_wrong and self._policy is not None:
                self._policy.renewed(has_drafts=bool(of_job.proposed))
            if of_job.proposed:
                proposals.append((job, of_job, of_job.proposed))
        return proposals

    def _new_drafter(self, job: DecodeJob) -> Drafter:
        return self._drafter() if self._shared is None else SharedLookup(self._shared, job.cache_namespace)
