"""Interface of the handover from prefill to decode, over a link or within one worker."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tandem.messages import Prefill, Shipped
from tandem.prefill_worker.job import PrefillJob
from tandem.worker.events import Event


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """An ended handover.

    Attributes:
        failure: reason of a failure; "" on success.
        refusal: the decode worker's word for it, if it refused the lease.
        ended_ns: time of the settlement; 0 if unknown.
    """

    job: PrefillJob
    failure: str = ""
    ended_ns: int = 0
    refusal: str = ""


class Handover(ABC):
    @abstractmethod
    def refusal(self, request: Prefill) -> str:
        """Returns the reason why this request cannot be handed over now, or ""."""

    @abstractmethod
    def begin(self, job: PrefillJob) -> None:
        """Prefill starts: requests pages at the decode worker."""

    @abstractmethod
    def advance(self, job: PrefillJob) -> None:
        """A chunk is computed; the last one if job.first_token is set."""

    @abstractmethod
    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        """Ends a job, without a result.

        Args:
            reported: whether the router learns of the end without this.
        """

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Takes every event of the scheduler and ignores unrelated ones."""

    @abstractmethod
    def go_on(self) -> None:
        """Continues open handovers without ending jobs; also called during a launch, whose jobs must not change."""

    @abstractmethod
    def take_results(self) -> list[HandoverResult]:
        """Continues open handovers and returns those that ended."""

    @abstractmethod
    def continues_here(self, request: Prefill) -> bool:
        """Returns whether the same engine decodes the request, behind the launched prefill."""

    @property
    @abstractmethod
    def shipped(self) -> tuple[Shipped, ...]:
        """Totals of each transport and receiver since the start."""

    @property
    @abstractmethod
    def is_copying(self) -> bool:
        """Whether to poll take_results: copies are in flight or completed since the last call."""
