from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.engine.grammars import Constraint
from tandem.messages import Prefill
from tandem.prefix import prefix_identities
from tandem.priority import virtual_arrival_ns
from tandem.worker.adapter_uses import NO_USE, AdapterUse

# Place before every age with every priority.
BEFORE_ALL = -(2**64)


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits for its prefill.

    Attributes:
        number: order of arrival.
        token_ids: prompt and output of earlier attempts.
        page_size: the pool's, in tokens.
        received_ns: arrival at this worker; 0 if unknown.
        num_overtaken: number of later requests started before it.
        is_prefetched: whether a prefetch of its stored pages has begun, or none is needed.
        adapter: use of its adapter, held from the start of its job.
    """

    request: Prefill
    number: int
    token_ids: list[int]
    page_size: int
    constraint: Constraint | None = None
    received_ns: int = 0
    num_overtaken: int = 0
    is_prefetched: bool = False
    adapter: AdapterUse = NO_USE
    _prefix_ids: list[int] | None = field(default=None, init=False)

    @property
    def num_full_pages(self) -> int:
        return len(self.token_ids) // self.page_size

    @property
    def prefix_ids(self) -> list[int]:
        """The identity of the prefix up to each full page's end, computed at first use: of many requests at once, only
        some start at once."""
        if self._prefix_ids is None:
            self._prefix_ids = prefix_identities(self.token_ids, self.page_size, self.request.cache_namespace)
        return self._prefix_ids

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.request.attempt

    @property
    def computes_all(self) -> bool:
        """True if its log probabilities need the whole prompt, cached or not."""
        return self.request.sampling.num_prompt_logprobs is not None

    @property
    def is_preparing(self) -> bool:
        """True while its grammar is compiled, or its adapter loaded."""
        return (self.constraint is not None and not self.constraint.is_ready) or self.adapter.is_loading

    @property
    def queue_key(self) -> tuple[int, int]:
        """Sort key: age over all attempts, and priority. Moving streams go first: their clients are reading."""
        if self.request.is_move:
            return BEFORE_ALL, self.number
        return virtual_arrival_ns(self.request.arrival_ns, self.request.priority), self.number


class PagesInWork:
    """Full pages that started jobs have still to compute."""

    def __init__(self) -> None:
        self._num_jobs: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._num_jobs)

    def enter_work(self, prefix_ids: Sequence[int]) -> None:
        for identity in prefix_ids:
            self._num_jobs[identity] = self._num_jobs.get(identity, 0) + 1

    def leave_work(self, prefix_ids: Sequence[int]) -> None:
        for identity in prefix_ids:
            self._num_jobs[identity] -= 1
            if not self._num_jobs[identity]:
                del self._num_jobs[identity]

    def num_next_in_work(self, prefix_ids: Sequence[int], num_cached_pages: int) -> int:
        """Returns the number of consecutive pages in work after the cached ones."""
        num_pages = 0
        while num_cached_pages + num_pages < len(prefix_ids):
            if prefix_ids[num_cached_pages + num_pages] not in self._num_jobs:
                break
            num_pages += 1
        return num_pages
