"""The seam between prefill and whatever continues it: another worker over a link, or the same one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tandem.messages import Prefill, Shipped
from tandem.prefill_worker.job import PrefillJob
from tandem.worker.events import Event


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """A job that its handover is done with; `failure` says why it did not succeed.

    Attributes:
        ended_ns: when the other worker was told so; 0: nobody has noted that.
    """

    job: PrefillJob
    failure: str = ""
    ended_ns: int = 0


class Handover(ABC):
    """How a prefill reaches the worker that decodes it."""

    @abstractmethod
    def refusal(self, request: Prefill) -> str:
        """Why this request could not be handed over if it were prefilled now, or ""."""

    @abstractmethod
    def begin(self, job: PrefillJob) -> None:
        """Prefill starts: ask for pages at the other end."""

    @abstractmethod
    def advance(self, job: PrefillJob) -> None:
        """A chunk is computed, the last one if job.first_token is set."""

    @abstractmethod
    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        """The job ends here; take_results will not tell of it.

        Args:
            reported: whether the router knows, or is about to hear, that the attempt has ended.
        """

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Takes whatever the scheduler is told; most of it concerns no handover."""

    @abstractmethod
    def go_on(self) -> None:
        """Does what has become possible since, and ends no job: also called while a forward is being launched, whose
        jobs it must leave as they are."""

    @abstractmethod
    def take_results(self) -> list[HandoverResult]:
        """Goes on, and returns the jobs that ended since the last call."""

    @abstractmethod
    def continues_here(self, request: Prefill) -> bool:
        """Whether it is decoded by the same engine, behind the forwards that are launched for prefill."""

    @property
    @abstractmethod
    def shipped(self) -> tuple[Shipped, ...]:
        """What has been sent since the start, for each transport."""

    @property
    @abstractmethod
    def is_copying(self) -> bool:
        """Whether take_results should look soon: copies were under way when it last did, or have begun since."""
