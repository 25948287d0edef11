from collections.abc import Callable, Sequence
from itertools import islice

from tandem.decode_worker.job import DecodeJob
from tandem.engine.batch import Batch
from tandem.engine.launch_list import ForwardPart
from tandem.engine.output import Feed, ForwardOutput


class DecodeStep(ForwardPart):
    """A decode step, from its composition until its tokens are known.

    After the launch, sequences are in the state after the step: later launches find its KV in the pages. Tokens are
    pending from `sample` on.

    Attributes:
        jobs: jobs in batch order, ended ones included.
        new_jobs: jobs whose first step this is.
        output: output of the forward pass after the launch, with the jobs' rows first.
        is_mixed: whether the pass includes prompts.
        overlaps: whether it was launched while another one was in flight.
        idle_s: time before the launch without a decode step in flight, after earlier steps.
        num_drafted: drafts of the jobs.
        num_accepted: accepted drafts of each job with drafts that has not ended, after `collect`.
    """

    output: ForwardOutput
    is_mixed: bool = False
    overlaps: bool = False
    idle_s: float = 0.0
    num_drafted: int = 0

    def __init__(
        self,
        jobs: Sequence[DecodeJob],
        new_jobs: Sequence[DecodeJob],
        previous: "DecodeStep | None",
        on_launch: "Callable[[DecodeStep], None]",
        on_end: "Callable[[DecodeStep], None]",
    ) -> None:
        """
        Args:
            jobs: jobs with a page for one more token each.
            previous: the step before, if its tokens are not known.
            on_end: must call `collect`.
        """
        self.jobs = jobs
        self.new_jobs = new_jobs
        self.sequences = [job.sequence for job in jobs]
        self._previous = previous
        self._on_launch = on_launch
        self._on_end = on_end
        self._is_sampled = False
        self._num_rows = [1 + len(sequence.draft_ids) for sequence in self.sequences]
        self.num_drafted = sum(self._num_rows) - len(jobs)
        self.num_accepted: dict[DecodeJob, int] = {}

    def begin(self) -> None:
        previous, self._previous = self._previous, None
        for sequence in self.sequences:
            sequence.extend(1 + len(sequence.draft_ids))
        self.feed = previous.feed_of(self.jobs) if previous else None

    def launched(self, output: ForwardOutput, batch: Batch) -> None:
        """`sample` must follow, after the previous step's tokens are known and before the next launch."""
        self.output = output
        self.is_mixed = batch.mode == "mixed"
        for sequence in self.sequences:
            sequence.complete_extend()
        if not batch.waits_for_tokens:
            self.sample()
        self._on_launch(self)

    def sample(self) -> None:
        if self._is_sampled:
            return
        self._is_sampled = True
        self.output.sample()
        for sequence in self.sequences:
            sequence.num_pending += 1

    def feed_of(self, jobs: Sequence[DecodeJob]) -> Feed | None:
        """Returns the rows from which the next step of `jobs` reads its tokens; None if all are known."""
        rows = {job: row for row, job in enumerate(self.jobs)}
        rows_of_jobs = [rows[job] if job.sequence.num_pending else -1 for job in jobs]
        return Feed(self.output, rows_of_jobs) if max(rows_of_jobs) >= 0 else None

    def end(self) -> None:
        self._on_end(self)

    def collect(self) -> list[DecodeJob]:
        """Waits for the tokens. Returns the jobs that have not ended."""
        going_on: list[DecodeJob] = []
        sampled = zip(self.output.token_ids(), self.output.logprobs(), strict=True)
        for job, num_rows in zip(self.jobs, self._num_rows, strict=True):
            first = next(sampled)
            behind_drafts = [*islice(sampled, num_rows - 1)] if num_rows > 1 else []
            if job.has_ended:
                continue
            if behind_drafts:
                self.num_accepted[job] = job.take_drafted([first, *behind_drafts])
            else:
                job.take(*first)
            going_on.append(job)
        return going_on
