"""Speculation with drafts of a model, which are made for all requests of a step at once."""

from collections.abc import Callable, Sequence

from tandem.decode_worker.draft_depth import DraftDepth
from tandem.decode_worker.draft_policy import DraftPolicy
from tandem.decode_worker.drafting import MAX_DRAFTS, StepDrafts
from tandem.decode_worker.job import DecodeJob, JobDrafts
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager


class ModelDrafting(StepDrafts):
    """Gives the jobs of a step the drafts of the engine's drafter, which needs pages for them first."""

    def __init__(
        self,
        source: str,
        engine: EngineBase,
        cache: CacheManager,
        policy: DraftPolicy,
        depth: DraftDepth,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            source: for the counts.
            policy: observes acceptance.

        Raises:
            ValueError: the engine has no drafter.
        """
        if engine.draft_maker is None:
            raise ValueError(f"speculation {source} needs an engine with a drafter")
        super().__init__(source, engine, cache)
        self._maker = engine.draft_maker
        self._policy = policy
        self._depth = depth
        self._clock = clock

    def draft(self, jobs: Sequence[DecodeJob], running: Sequence[DecodeJob], *, may_grow: bool) -> None:
        began = self._clock()
        num_reserved = self.num_reserved(running) if may_grow else None
        self._grammar_cpu_s = 0.0
        asked = self._asked(jobs)
        requests = [(of_job.acceptance[self._source], most) for _, of_job, most in asked]
        depth = self._depth.choose(requests, len(jobs), sum(job.sequence.cached_len + 1 for job in jobs))
        drafted: list[tuple[DecodeJob, JobDrafts]] = []
        counts: list[int] = []
        for job, of_job, most in asked:
            if (count := self._room(job, min(depth, most), num_reserved)) > 0:
                drafted.append((job, of_job))
                counts.append(count)
        made = self._maker.make([job.sequence for job, _ in drafted], counts) if drafted else []
        for (job, of_job), drafts in zip(drafted, made, strict=True):
            of_job.proposed, of_job.proposed_at = drafts, len(job.sequence.token_ids)
            self._take(job, of_job, self._until_stop(job, drafts))
        self._depth.drafted(max(counts, default=0), self._clock() - began)

    def _asked(self, jobs: Sequence[DecodeJob]) -> list[tuple[DecodeJob, JobDrafts, int]]:
        """Returns the jobs that may have drafts, with the most of each."""
        asked = []
        for job in jobs:
            if job.drafts is None:
                usual = self._policy.usual_acceptance(self._source)
                job.drafts = JobDrafts(acceptance={self._source: usual}, source=self._source)
            of_job = job.drafts
            sampled = job.sequence.token_ids[of_job.proposed_at :]
            known = of_job.acceptance[self._source]
            of_job.acceptance[self._source] = self._policy.observe(self._source, known, of_job.proposed, sampled)
            of_job.proposed = ()
            # The last token of an output needs no draft: the step before it samples it.
            most = min(MAX_DRAFTS, job.sequence.sampling.max_tokens - job.num_outputs - 1)
            if most > 0 and not job.is_moving:
                asked.append((job, of_job, most))
        return asked
