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
    """The prompt chunks of one forward pass, from their composition until their results are known.

    After the launch, sequences are in the state after the pass: later launches find its KV in the pages.

    Attributes:
        jobs: jobs in batch order, ended ones included.
        num_tokens: tokens computed of each job.
        output: output of the pass after the launch, with rows of decoded sequences first.
        num_decoded: sequences decoded in the same pass.
        handed_over: jobs whose prompts end with it and that go on to decode.
        joining_ids: requests whose first decode step is in the same pass.
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
            chunks: jobs, each with its number of tokens to compute.
            on_end: must call `collect`.
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
        # Kept because a sequence's next chunk may be launched before this one is collected.
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
        """Waits for the pass, then updates and yields each job that has not ended, one at a time, so the caller may end
        later ones."""
        sampled = zip(self.output.token_ids(), self.output.logprobs(), strict=True)
        scored = self.output.prompt_logprobs()[self.num_decoded :]
        embeddings = self.output.embeddings()[self.num_decoded :]
        return self._tell(islice(sampled, self.num_decoded, None), scored, embeddings, now_ns())

    def _tell(
        self,
        sampled: Iterator[tuple[int, TokenLogprobs | None]],
        prompt_logprobs: Sequence[PackedLogprobs | None],
        embeddings: Sequence[bytes | None],
        ended_ns: int,
    ) -> Iterator[PrefillJob]:
        parts = zip(self.jobs, self._are_last, prompt_logprobs, embeddings, strict=True)
        for job, is_last, scored, embedding in parts:
            first = next(sampled) if is_last else None
            if job.handle is None:
                continue
            job.prompt_logprobs = scored
            if first is not None:
                job.take_first(*first, ended_ns)
            if embedding is not None:
                job.take_embedding(embedding, ended_ns)
            yield job
