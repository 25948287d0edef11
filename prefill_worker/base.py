"""Interface of the handover from prefill to decode, over a link or within one worker."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tandem.messages import Prefill, Shipped
from tandem.prefill_worker.job import PrefillJob
from tandem.worker.events import Event


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """A job whose handover has ended.

    Attributes:
        failure: reason of a failed handover; "" on success.
        ended_ns: time of the message that settled it; 0 if unknown.
    """

    job: PrefillJob
    failure: str = ""
    ended_ns: int = 0


class Handover(ABC):
    """Moves prefilled requests to the worker that decodes them."""

    @abstractmethod
    def refusal(self, request: Prefill) -> str:
        """Returns the reason why this request cannot be handed over now, or ""."""

    @abstractmethod
    def begin(self, job: PrefillJob) -> None:
        """Prefill has started: requests pages at the decode worker."""

    @abstractmethod
    def advance(self, job: PrefillJob) -> None:
        """A chunk is computed; the last one if job.first_token is set."""

    @abstractmethod
    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        """Ends a job. take_results does not return it.

        Args:
            reported: whether the router knows, or is about to learn, that the attempt has ended.
        """

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Takes every event of the scheduler and ignores unrelated ones."""

    @abstractmethod
    def go_on(self) -> None:
        """Continues open handovers but ends no job. It may run while a forward pass is launched, whose jobs must not
        change."""

    @abstractmethod
    def take_results(self) -> list[HandoverResult]:
        """Continues open handovers and returns those that ended since the last call."""

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
        """Whether take_results should be polled: copies are in flight, or completed since its last call."""
