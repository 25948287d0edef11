"""Requests waiting for prefill, and which of them share a prefix that is being computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.grammars import Constraint
from tandem.messages import Prefill
from tandem.priority import virtual_arrival_ns


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits for its prefill to start.

    Attributes:
        number: position in arrival at this worker.
        token_ids: prompt, and output of earlier attempts.
        prefix_ids: for each full page of the tokens an identity of everything up to its end: equal where prefixes are.
        constraint: what keeps its output to its grammar, None if it has none.
        received_ns: when it came to this worker; 0: nobody has noted that.
        num_overtaken: how often a request that came later was started first.
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
        """Whether nothing that is cached, or that others compute, saves it from computing its whole prompt."""
        return self.request.sampling.num_prompt_logprobs is not None

    @property
    def is_compiling(self) -> bool:
        """Whether it cannot start because its grammar is not compiled yet."""
        return self.constraint is not None and not self.constraint.is_ready

    @property
    def queue_key(self) -> tuple[int, int]:
        """Smaller stands before; by age, which a request keeps over all attempts, and priority."""
        return virtual_arrival_ns(self.request.arrival_ns, self.request.priority), self.number


class PagesInWork:
    """The full pages that started jobs have yet to compute."""

    def __init__(self) -> None:
        self._num_jobs: dict[int, int] = {}

    def enter_work(self, prefix_ids: Sequence[int]) -> None:
        """A job is going to compute these pages."""
        for identity in prefix_ids:
            self._num_jobs[identity] = self._num_jobs.get(identity, 0) + 1

    def leave_work(self, prefix_ids: Sequence[int]) -> None:
        """These pages are computed, or their job has ended."""
        for identity in prefix_ids:
            self._num_jobs[identity] -= 1
            if not self._num_jobs[identity]:
                del self._num_jobs[identity]

    def num_next_in_work(self, prefix_ids: Sequence[int], num_cached_pages: int) -> int:
        """How many of a request's pages, from the first that is not cached, somebody is computing."""
        num_pages = 0
        while num_cached_pages + num_pages < len(prefix_ids):
            if prefix_ids[num_cached_pages + num_pages] not in self._num_jobs:
                break
            num_pages += 1
        return num_pages
