"""Requests waiting for prefill, and prefixes that are being computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.grammars import Constraint
from tandem.messages import Prefill
from tandem.priority import virtual_arrival_ns


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits for its prefill.

    Attributes:
        number: order of arrival at this worker.
        token_ids: prompt and output of earlier attempts.
        prefix_ids: identity of the prefix up to each full page's end; equal for equal prefixes.
        constraint: grammar constraint of the output, if any.
        received_ns: arrival at this worker; 0 if unknown.
        num_overtaken: number of later requests started before it.
    """

    request: Prefill
    number: int
    token_ids: list[int]
    prefix_ids: list[int]
    constraint: Constraint | None = None
    received_ns: int = 0
    num_overtaken: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.request.attempt

    @property
    def computes_all(self) -> bool:
        """True if its whole prompt must be computed, cached or not, for its log probabilities."""
        return self.request.sampling.num_prompt_logprobs is not None

    @property
    def is_compiling(self) -> bool:
        """True if it cannot start because its grammar is not compiled."""
        return self.constraint is not None and not self.constraint.is_ready

    @property
    def queue_key(self) -> tuple[int, int]:
        """Sort key, the smallest first: age over all attempts and priority."""
        return virtual_arrival_ns(self.request.arrival_ns, self.request.priority), self.number


class PagesInWork:
    """Full pages that started jobs have still to compute."""

    def __init__(self) -> None:
        self._num_jobs: dict[int, int] = {}

    def enter_work(self, prefix_ids: Sequence[int]) -> None:
        """Adds the pages of a started job."""
        for identity in prefix_ids:
            self._num_jobs[identity] = self._num_jobs.get(identity, 0) + 1

    def leave_work(self, prefix_ids: Sequence[int]) -> None:
        """Removes computed pages, or those of an ended job."""
        for identity in prefix_ids:
            self._num_jobs[identity] -= 1
            if not self._num_jobs[identity]:
                del self._num_jobs[identity]

    def num_next_in_work(self, prefix_ids: Sequence[int], num_cached_pages: int) -> int:
        """Returns how many consecutive pages after the cached ones are being computed."""
        num_pages = 0
        while num_cached_pages + num_pages < len(prefix_ids):
            if prefix_ids[num_cached_pages + num_pages] not in self._num_jobs:
                break
            num_pages += 1
        return num_pages
