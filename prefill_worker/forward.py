"""One prefill forward, from its launch until its results are known."""

from collections.abc import Callable, Iterator, Sequence

from engine.base import EngineBase
from engine.batch import Batch
from prefill_worker.job import PrefillJob
from tandem.lifecycle import now_ns
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs


class LaunchedForward:
    """A forward that the device is running, or will run behind the one before.

    From the launch on, sequences are as they will be when it is done: whatever is launched later finds its KV in the
    pages. What a job has to show (`computed_len`, its first token) comes with `collect`.

    Attributes:
        jobs: in the order of the batch; also those that have ended since.
        output: of the forward; until it is done, the pages of all these jobs are in use.
        handed_over: those of them whose prompts end with it and are to be decoded.
    """

    def __init__(self, engine: EngineBase, jobs: Sequence[PrefillJob], meanwhile: Callable[[], None]) -> None:
        """Launches it.

        Args:
            jobs: their sequences extended by what is to be computed of each.
            meanwhile: as of EngineBase.forward.
        """
        self.jobs = jobs
        sequences = [job.sequence for job in jobs]
        self.output = engine.forward(Batch("prefill", sequences), meanwhile)
        # These are remembered because the next chunk of a sequence may have been launched when this one is collected.
        self._ends = [(sequence.device_len, sequence.needs_logits) for sequence in sequences]
        self.handed_over = [
            job
            for job, (_, needs_logits) in zip(jobs, self._ends, strict=True)
            if needs_logits and job.request.sampling.max_tokens > len(job.request.output_ids) + 1
        ]
        for sequence in sequences:
            sequence.complete_extend()

    def collect(self) -> Iterator[PrefillJob]:
        """Waits for the forward; then tells one job after the other what is computed of it. It goes on with those that
        have not ended, each before the next is told: what the caller does in between finds that one as it was."""
        sampled = zip(self.output.token_ids(), self.output.logprobs(), strict=True)
        return self._tell(sampled, self.output.prompt_logprobs(), now_ns())

    def _tell(
        self,
        sampled: Iterator[tuple[int, TokenLogprobs | None]],
        prompt_logprobs: Sequence[PackedLogprobs | None],
        ended_ns: int,
    ) -> Iterator[PrefillJob]:
        for job, (computed_len, needs_logits), scored in zip(self.jobs, self._ends, prompt_logprobs, strict=True):
            first = next(sampled) if needs_logits else None
            if job.handle is None:
                continue
            job.computed_len = computed_len
            job.prompt_logprobs = scored
            if first is not None:
                job.take_first(*first, ended_ns)
            yield job
