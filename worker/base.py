"""What every worker shares: its scheduler, the outbox that speaks for it, and the seam between prefill and whatever
continues it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from engine.base import EngineBase
from engine.kvcache.cache_manager import CacheManager, Completion, PageHandle
from engine.token_sequence import TokenSequence
from tandem.lifecycle import now_ns
from tandem.messages import (
    Admit,
    Prefill,
    ReceiverMessage,
    SenderMessage,
    Shipped,
    WorkerMessage,
    WorkerStats,
)
from tandem.sampling_params import TokenLogprobs
from worker.events import Event


class Outbox(Protocol):
    """Where schedulers put messages; they leave together, at the end of the step or at `flush`."""

    def to_router(self, message: WorkerMessage) -> None: ...

    def to_link(self, epoch: str, message: SenderMessage | ReceiverMessage) -> None: ...

    def close_link(self, epoch: str, reason: str) -> None:
        """Ends an epoch that cannot work."""
        ...

    def flush(self) -> None:
        """Sends what has been said so far: before a forward that would keep it waiting."""
        ...


class Scheduler(ABC):
    """What runs next on a worker. Called by the engine thread only, one call at a time."""

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Takes an event; computes nothing yet."""

    @abstractmethod
    def step(self) -> bool:
        """Does what can be done now, one forward of each mode at most; returns whether there was anything to do."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When, on the scheduler's clock, a step is due even if nothing arrives."""

    @abstractmethod
    def stats(self) -> WorkerStats: ...

    @abstractmethod
    def check_integrity(self) -> str:
        """Returns the first violation of page accounting, or ""."""


class ForwardScheduler(Scheduler):
    """Runs the forwards of one mode. On an asynchronous engine one may be in flight when a step returns."""

    @abstractmethod
    def settle(self) -> None:
        """Waits for the forward that has been launched, if any, and passes on what it gave."""


def engine_stats(engine: EngineBase, cache: CacheManager) -> WorkerStats:
    """What an engine and its cache count; the rest is a scheduler's own."""
    return WorkerStats(
        num_total_pages=cache.num_pages,
        num_free_pages=cache.num_free_pages,
        num_cached_pages=cache.num_cached_pages,
        num_locked_pages=cache.num_locked_pages,
        num_leased_pages=cache.num_leased_pages,
        prompt_tokens_computed=engine.counters.prompt_tokens_computed,
        output_tokens_computed=engine.counters.output_tokens_computed,
    )


# --- the seam between prefill and what continues it --------------------------------------------------------------


@dataclass(eq=False, slots=True)
class PrefillJob:
    """One request at prefill, from the moment its pages are locked until it is handed over.

    Attributes:
        handle: the locked pages; None once a handover has taken them over, or the job has ended.
        copies: reads of these pages that may still run when the job ends.
        pages_to_compute: identities of the full pages that no forward has been launched for yet, in order.
        computed_len: tokens whose KV is known to be in the pages, and may be shipped; `sequence` is ahead of that while
            a forward is in flight.
        first_token: sampled, once prefill is done, at `first_token_time_ns`; with its `finish_reason`, and its
            `logprobs` if asked for.
    """

    request: Prefill
    sequence: TokenSequence
    handle: PageHandle | None
    started_ns: int
    copies: list[Completion] = field(default_factory=list)
    pages_to_compute: list[int] = field(default_factory=list)
    computed_len: int = field(init=False)
    first_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    first_token_time_ns: int = 0
    finish_reason: str = ""

    def __post_init__(self) -> None:
        self.computed_len = self.sequence.cached_len

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.request.attempt

    @property
    def is_new(self) -> bool:
        """Whether no forward has been launched for it yet."""
        return self.handle is not None and self.sequence.cached_len == self.handle.cached_len

    def take_first(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Prefill is done."""
        self.first_token = token_id
        self.logprobs = () if logprobs is None else (logprobs,)
        self.first_token_time_ns = now_ns()


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """A job that its handover is done with; `failure` says why it did not succeed."""

    job: PrefillJob
    failure: str = ""


class Handover(ABC):
    """How a prefill reaches the worker that decodes it."""

    @abstractmethod
    def refusal(self, request: Prefill) -> str:
        """Why this request could not be handed over if it were prefilled now, or ""."""

    @abstractmethod
    def start(self, job: PrefillJob) -> None:
        """Prefill starts: ask for room at the other end."""

    @abstractmethod
    def advance(self, job: PrefillJob) -> None:
        """A chunk is computed, the last one if job.first_token is set."""

    @abstractmethod
    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        """The job ends here; poll will not report it.

        Args:
            reported: whether the router knows, or is about to hear, that the attempt has ended.
        """

    @abstractmethod
    def receive(self, event: Event) -> None: ...

    @abstractmethod
    def poll(self) -> list[HandoverResult]:
        """Returns the jobs that ended since the last call."""

    @property
    @abstractmethod
    def continues_here(self) -> bool:
        """Whether jobs are decoded by the same engine, behind the forwards that are launched for prefill."""

    @property
    @abstractmethod
    def shipped(self) -> tuple[Shipped, ...]:
        """What has been sent since the start, for each transport."""

    @property
    @abstractmethod
    def is_copying(self) -> bool:
        """Whether copies are under way whose end poll should see soon."""


class AdoptingScheduler(ForwardScheduler):
    """A decode scheduler that can be handed pages of its own pool."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests that it decodes."""

    @abstractmethod
    def take_admitted(self, request_id: str, attempt: int) -> Admit | None:
        """Hands out an admitted request, None if it has ended."""

    @abstractmethod
    def adopt(
        self,
        admit: Admit,
        handle: PageHandle,
        *,
        first_token: int,
        logprobs: tuple[TokenLogprobs, ...],
        finish_reason: str,
        num_pages_shipped: int,
        granted_ns: int,
    ) -> None:
        """Takes over a prefilled request together with its pages."""
