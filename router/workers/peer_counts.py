"""What the other routers of a cluster have in hand, as far as they have said: so that limits and loads are those of the
whole cluster, wherever a client's connections happen to end."""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# A router that has said nothing for so long has nothing in hand: it is gone, and its requests with it.
FRESH_S = 2.0


class AssignedLoad(NamedTuple):
    """What a router has assigned to one worker.

    Attributes:
        num_pending_tokens: that it has yet to prefill.
        num_decoding: requests that it decodes, or is going to.
        num_kv_tokens: tokens of their prompts, and of the outputs that they came with.
        num_arriving_tokens: of these, the ones that are not thought to be cached there, of requests of which it has
            sent no token yet.
    """

    num_requests: int = 0
    num_pending_tokens: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_arriving_tokens: int = 0

    def plus(self, other: "AssignedLoad") -> "AssignedLoad":
        return AssignedLoad(*map(operator.add, self, other))

    def minus(self, other: "AssignedLoad") -> "AssignedLoad":
        return AssignedLoad(*map(operator.sub, self, other))


NOTHING = AssignedLoad()


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """What one router has in hand.

    Attributes:
        num_queued: of its requests, those that wait for their first token.
        num_requests_by_key: by a digest of the API key; empty where keys have no limits.
        assigned: by the worker's id.
        pid: of the router's process.
    """

    num_requests: int
    num_queued: int
    num_requests_by_key: Mapping[str, int] = field(default_factory=dict)
    assigned: Mapping[str, AssignedLoad] = field(default_factory=dict)
    pid: int = 0


class PeerCounts:
    """The latest counts of each other router."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[str, tuple[float, RouterCounts]] = {}

    def record(self, router_id: str, counts: RouterCounts) -> None:
        self._counts[router_id] = self._clock(), counts

    def forget(self, router_id: str) -> None:
        """It is gone, and its requests with it."""
        self._counts.pop(router_id, None)

    def counts_of(self, router_id: str) -> RouterCounts | None:
        """None: it has not been heard of for FRESH_S."""
        heard_at, counts = self._counts.get(router_id, (-FRESH_S, None))
        return counts if self._clock() - heard_at < FRESH_S else None

    @property
    def num_requests(self) -> int:
        """Requests in hand at other routers."""
        return sum(counts.num_requests for counts in self._fresh())

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first token at other routers."""
        return sum(counts.num_queued for counts in self._fresh())

    def num_requests_of(self, key_digest: str) -> int:
        """Requests of an API key in hand at other routers."""
        return sum(counts.num_requests_by_key.get(key_digest, 0) for counts in self._fresh())

    def assigned_to(self, worker_id: str) -> AssignedLoad:
        """What other routers have assigned to a worker."""
        total = NOTHING
        for counts in self._fresh():
            if (load := counts.assigned.get(worker_id)) is not None:
                total = total.plus(load)
        return total

    def _fresh(self) -> Iterator[RouterCounts]:
        for router_id in self._counts:
            if (counts := self.counts_of(router_id)) is not None:
                yield counts
