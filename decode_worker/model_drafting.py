"""Speculation with drafts of a model, which are made for all requests of a step at once."""

from collections.abc import Sequence

from tandem.decode_worker.drafting import MAX_DRAFTS, StepDrafts
from tandem.decode_worker.job import DecodeJob, JobDrafts
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager


class ModelDrafting(StepDrafts):
    """Gives the jobs of a step the drafts of the engine's drafter, which needs pages for them first."""

    def __init__(self, source: str, engine: EngineBase, cache: CacheManager) -> None:
        """Raises ValueError: the engine has no drafter. Args: source: for the counts."""
        if engine.draft_maker is None:
            raise ValueError(f"speculation {source} needs an engine with a drafter")
        super().__init__(source, engine, cache)
        self._maker = engine.draft_maker

    def draft(self, jobs: Sequence[DecodeJob], running: Sequence[DecodeJob], *, may_grow: bool) -> None:
        num_reserved = self.num_reserved(running) if may_grow else None
        self._grammar_cpu_s = 0.0
        drafted: list[tuple[DecodeJob, JobDrafts]] = []
        counts: list[int] = []
        for job in jobs:
            # The last token of an output needs no draft: the step before it samples it.
            most = min(MAX_DRAFTS, job.sequence.sampling.max_tokens - job.num_outputs - 1)
            if most <= 0 or job.is_moving:
                continue
            if (count := self._room(job, most, num_reserved)) > 0:
                job.drafts = job.drafts or JobDrafts(source=self._source)
                drafted.append((job, job.drafts))
                counts.append(count)
        if not drafted:
            return
        made = self._maker.make([job.sequence for job, _ in drafted], counts)
        for (job, of_job), drafts in zip(drafted, made, strict=True):
            self._take(job, of_job, self._until_stop(job, drafts))
