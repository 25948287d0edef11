"""What one forward computes of prompts, from its composition until its results are known."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from tandem.engine.batch import Batch
from tandem.engine.launch_list import ForwardPart
from tandem.engine.output import ForwardOutput
from tandem.lifecycle import now_ns
from tandem.prefill_worker.job import PrefillJob
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs


class PromptChunks(ForwardPart):
    """Chunks that the device computes, or will compute behind what was launched before.

    From the launch on, sequences are as they will be when it is done: whatever is launched later finds its KV in the
    pages. What a job has to show, its first token, comes with `collect`.

    Attributes:
        jobs: in the order of the batch; also those that have ended since.
        num_tokens: that are computed of each.
        output: of the forward, from the launch on; what is decoded in it comes before the jobs.
        num_decoded: sequences that are decoded in the same forward; likewise.
        handed_over: those of the jobs whose prompts end with it and are to be decoded; likewise.
        joining_ids: requests that are decoded for the first time in the same forward.
    """

    output: ForwardOutput
    num_decoded: int = 0
    handed_over: Sequence[PrefillJob] = ()
    joining_ids: Sequence[str] = ()

    def __init__(
        self,
        chunks: Sequence[tuple[PrefillJob, int]],
        on_launch: "Callable[[PromptChunks], None]",
        on_end: "Callable[[PromptChunks], None]",
    ) -> None:
        """
        Args:
            chunks: jobs and how many tokens of each are to be computed.
            on_launch, on_end: told of both; the latter is to `collect`.
        """
        self.jobs = [job for job, _ in chunks]
        self.num_tokens = [num_tokens for _, num_tokens in chunks]
        self.sequences = [job.sequence for job in self.jobs]
        self._on_launch = on_launch
        self._on_end = on_end
        self._are_last: list[bool] = []

    def begin(self) -> None:
        for sequence, num_tokens in zip(self.sequences, self.num_tokens, strict=True):
            sequence.extend(num_tokens)

    def launched(self, output: ForwardOutput, batch: Batch) -> None:
        self.output = output
        self.num_decoded = batch.num_mixed
        # This is remembered because the next chunk of a sequence may have been launched when this one is collected.
        self._are_last = [sequence.needs_logits for sequence in self.sequences]
        self.handed_over = [
            job
            for job, is_last in zip(self.jobs, self._are_last, strict=True)
            if is_last and job.request.sampling.max_tokens > len(job.request.output_ids) + 1
        ]
        for sequence in self.sequences:
            sequence.complete_extend()
        self._on_launch(self)

    def end(self) -> None:
        self._on_end(self)

    def collect(self) -> Iterator[PrefillJob]:
        """Waits for the forward; then tells one job after the other what is computed of it. It goes on with those that
        have not ended, each before the next is told: what the caller does in between finds that one as it was."""
        sampled = zip(self.output.token_ids(), self.output.logprobs(), strict=True)
        scored = self.output.prompt_logprobs()[self.num_decoded :]
        return self._tell(islice(sampled, self.num_decoded, None), scored, now_ns())

    def _tell(
        self,
        sampled: Iterator[tuple[int, TokenLogprobs | None]],
        prompt_logprobs: Sequence[PackedLogprobs | None],
        ended_ns: int,
    ) -> Iterator[PrefillJob]:
        for job, is_last, scored in zip(self.jobs, self._are_last, prompt_logprobs, strict=True):
            first = next(sampled) if is_last else None
            if job.handle is None:
                continue
            job.prompt_logprobs = scored
            if first is not None:
                job.take_first(*first, ended_ns)
            yield job
