"""Forward passes that write marks half a page at a time, at the simulation's command."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.batch import Batch
from tandem.engine.launch_list import ForwardPart
from tandem.engine.output import ForwardOutput
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs
from tests.fakes.page_store.memory import HALVES, PAGE_SIZE, Memory, content, content_mark

if TYPE_CHECKING:
    from tests.fakes.page_store.jobs import Job


@dataclass(frozen=True)
class Extension:
    """One sequence of a forward pass, as the device knows it. Attributes: start, end: positions to compute."""

    namespace: str
    token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]
    start: int
    end: int

    def mark(self, page: int, num_tokens: int) -> bytes:
        return content_mark(self.namespace, self.token_ids[: min(num_tokens, (page + 1) * PAGE_SIZE)])


class SimForward(ForwardOutput):
    """A forward pass. Its result is known to the jobs."""

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self.extensions = extensions
        self._left = list(HALVES)

    @property
    def page_ids(self) -> set[int]:
        return {page for extension in self.extensions for page in extension.page_ids}

    def done(self) -> bool:
        return not self._left

    def run(self, pool: Memory, stamp: int, name: str) -> None:
        """Reads and writes one half of all pages."""
        half = self._left.pop(0)
        for extension in self.extensions:
            for page in range(-(-extension.start // PAGE_SIZE)):
                page_id = extension.page_ids[page]
                assert pool.holds(page_id, extension.mark(page, extension.start), [half]), (
                    f"{name}: a request reads page {page_id} with another's content"
                )
            for page in range(extension.start // PAGE_SIZE, -(-extension.end // PAGE_SIZE)):
                pool.write(extension.page_ids[page], half, content(extension.mark(page, extension.end), stamp))

    def token_ids(self) -> list[int]:
        raise NotImplementedError

    def logprobs(self) -> list[TokenLogprobs | None]:
        raise NotImplementedError

    def prompt_logprobs(self) -> list[PackedLogprobs | None]:
        raise NotImplementedError

    def embeddings(self) -> list[bytes | None]:
        raise NotImplementedError


class SimPart(ForwardPart):
    def __init__(self, jobs: Sequence["Job"], chunk: int, collect: Callable[[Sequence["Job"]], None]) -> None:
        self.jobs = jobs
        self.sequences = [job.sequence for job in jobs]
        self._chunk = chunk
        self._collect = collect

    def begin(self) -> None:
        for sequence in self.sequences:
            sequence.device_len = min(sequence.length, sequence.device_len + self._chunk)

    def extensions(self) -> list[Extension]:
        return [
            Extension(job.namespace, tuple(s.token_ids), tuple(s.page_ids), s.cached_len, s.device_len)
            for job, s in zip(self.jobs, self.sequences, strict=True)
        ]

    def launched(self, output: ForwardOutput, batch: Batch | None = None) -> None:
        for sequence in self.sequences:
            sequence.cached_len = sequence.device_len

    def end(self) -> None:
        self._collect(self.jobs)
