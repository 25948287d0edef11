"""One decode step, from its launch until its tokens are known."""

from collections.abc import Sequence

from decode_worker.job import DecodeJob
from engine.base import EngineBase
from engine.batch import Batch
from engine.output import Feed


class LaunchedStep:
    """A step that the device is running, or will run behind the one before.

    From the launch on, sequences are as they will be when it is done: whatever is launched later finds its KV in the
    pages. Only the tokens are pending, from `sample` on.

    Attributes:
        jobs: in the order of the batch; also those that have ended since.
        output: of the forward; until it is done, the pages of all these jobs are in use.
    """

    def __init__(self, engine: EngineBase, jobs: Sequence[DecodeJob], previous: "LaunchedStep | None") -> None:
        """Launches it. Then `sample` is to be called, once the tokens of the step before are known and before the next
        launch.

        Args:
            jobs: with pages for one more token each.
            previous: the step launched just before, if its tokens are not known yet.
        """
        self.jobs = jobs
        for job in jobs:
            job.sequence.extend(1)
        feed = previous.feed(jobs) if previous else None
        batch = Batch("decode", [job.sequence for job in jobs], feed)
        self.output = engine.forward(batch)
        for job in jobs:
            job.sequence.complete_extend()
        self._is_sampled = False
        if not batch.waits_for_tokens:
            self.sample()

    def sample(self) -> None:
        """Has the tokens chosen, if they are not."""
        if self._is_sampled:
            return
        self._is_sampled = True
        self.output.sample()
        for job in self.jobs:
            job.sequence.num_pending += 1

    def feed(self, jobs: Sequence[DecodeJob]) -> Feed | None:
        """Where the next step, of `jobs`, finds its tokens; None if they are all known."""
        rows = {job: row for row, job in enumerate(self.jobs)}
        rows_of_jobs = [rows[job] if job.sequence.num_pending else -1 for job in jobs]
        return Feed(self.output, rows_of_jobs) if max(rows_of_jobs) >= 0 else None

    def collect(self) -> list[DecodeJob]:
        """Waits for the tokens and gives each job its own; returns the jobs that have not ended."""
        going_on: list[DecodeJob] = []
        for job, token_id, logprobs in zip(self.jobs, self.output.token_ids(), self.output.logprobs(), strict=True):
            if not job.has_ended:
                job.take(token_id, logprobs)
                going_on.append(job)
        return going_on
