"""Speculation with drafts of a model, which are made for all requests of a step at once."""

from collections.abc import Callable, Sequence

from tandem.decode_worker.draft_acceptance import AcceptanceMeans
from tandem.decode_worker.draft_depth import DraftDepth
from tandem.decode_worker.drafting import MAX_DRAFTS, StepDrafts
from tandem.decode_worker.job import DecodeJob, JobDrafts
from tandem.decode_worker.overlap_price import StepTime
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager

# Acceptance before the first observation. Too low, drafts that gain would hardly be observed.
START = 0.8
# Weight of an observation in a request's acceptance. Only computed drafts are observed, so a mean that is low by chance
# ends them, and few probes correct it.
WEIGHT, PROBE_WEIGHT = 1 / 32, 1 / 4


class ModelDrafting(StepDrafts):
    """Gives the jobs of a step the drafts of the engine's drafter, which needs pages for them first."""

    def __init__(
        self,
        source: str,
        engine: EngineBase,
        cache: CacheManager,
        depth: DraftDepth,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            source: for the counts.

        Raises:
            ValueError: the engine has no drafter.
        """
        if engine.draft_maker is None:
            raise ValueError(f"speculation {source} needs an engine with a drafter")
        super().__init__(source, engine, cache)
        self._maker = engine.draft_maker
        self._means = AcceptanceMeans(START)
        self._depth = depth
        self._clock = clock
        self._weight = WEIGHT

    def awaits_tokens(self, jobs: Sequence[DecodeJob]) -> bool:
        has_room = len(jobs) < self._engine.max_drafted_rows
        if has_room and self._choose(self._requests(jobs), jobs):
            return True
        self._depth.drafted(0, 0.0)
        return False

    def draft(self, jobs: Sequence[DecodeJob], running: Sequence[DecodeJob], *, may_grow: bool) -> None:
        began = self._clock()
        num_reserved = self.num_reserved(running) if may_grow else None
        num_left = self._engine.max_drafted_rows - len(jobs)
        self._grammar_cpu_s = 0.0
        for job in jobs:
            self._observe(job)
        requests = self._requests(jobs)
        depth = self._choose(requests, jobs)
        self._weight = PROBE_WEIGHT if self._depth.is_probe else WEIGHT
        asked: list[DecodeJob] = []
        counts: list[int] = []
        for job, _, most in requests:
            if (count := self._room(job, min(depth, most, num_left), num_reserved)) > 0:
                asked.append(job)
                counts.append(count)
                num_left -= count
        made = self._maker.make([job.sequence for job in asked], counts) if asked else []
        for job, drafts in zip(asked, made, strict=True):
            of_job = job.drafts = job.drafts or JobDrafts(source=self._source)
            of_job.proposed, of_job.proposed_at = drafts, len(job.sequence.token_ids)
            self._take(job, of_job, self._until_stop(job, drafts))
        self._depth.drafted(max(counts, default=0), self._clock() - began, len(asked))

    def timed(self, step: StepTime) -> None:
        self._depth.timed(step)

    def _observe(self, job: DecodeJob) -> None:
        """Compares the last drafts with the tokens behind them."""
        if (of_job := job.drafts) is None or not of_job.proposed:
            return
        sampled = job.sequence.token_ids[of_job.proposed_at :]
        known = self._acceptance(job)
        of_job.acceptance[self._source] = self._means.observe(
            self._source, known, of_job.proposed, sampled, self._weight
        )
        of_job.proposed = ()

    def _acceptance(self, job: DecodeJob) -> float:
        known = {} if job.drafts is None else job.drafts.acceptance
        return known.get(self._source, self._means.usual(self._source))

    def _requests(self, jobs: Sequence[DecodeJob]) -> list[tuple[DecodeJob, float, int]]:
        """Returns the jobs that may have drafts, with acceptance and the most drafts of each."""
        most_drafts = min(MAX_DRAFTS, self._engine.max_drafts)
        requests = []
        for job in jobs:
            # The last token of an output needs no draft: the step before it samples it.
            most = min(most_drafts, job.sequence.sampling.max_tokens - job.num_outputs - 1)
            if most > 0 and self._may_draft(job):
                requests.append((job, self._acceptance(job), most))
        return requests

    def _choose(self, requests: Sequence[tuple[DecodeJob, float, int]], jobs: Sequence[DecodeJob]) -> int:
        chances = [(acceptance, most) for _, acceptance, most in requests]
        return self._depth.choose(chances, len(jobs), sum(job.sequence.cached_len + 1 for job in jobs))
