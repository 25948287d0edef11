"""What a decode worker remembers of requests that have no pages here: those to come, and those that have ended."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tandem.messages import Admit

# So many ended attempts are remembered, to refuse their late lease requests at once.
NUM_ENDED_REMEMBERED = 4096

# An attempt is known by its request's id and its own number.
AttemptKey = tuple[str, int]


@dataclass(eq=False, slots=True)
class _Admitted:
    """A request that the router has announced, and until when it is remembered without a lease request."""

    admit: Admit
    deadline: float


class Admissions:
    """Requests that the router has announced, each until its lease is asked for, it ends, or its time is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._admitted: dict[AttemptKey, _Admitted] = {}
        # No request's time is over before this. It is exact after each look through all of them, and may be too early
        # in between, so that a step that comes before it looks at none.
        self._first_deadline = math.inf
        self._ended: OrderedDict[AttemptKey, None] = OrderedDict()

    def find_admitted(self, key: AttemptKey) -> Admit | None:
        """The request, if it is announced and no lease has been asked for."""
        admitted = self._admitted.get(key)
        return admitted.admit if admitted else None

    def remember_admitted(self, admit: Admit) -> None:
        """Remembers a request for as long as it says."""
        deadline = self._clock() + admit.duration_s
        self._admitted[admit.request_id, admit.attempt] = _Admitted(admit, deadline)
        self._first_deadline = min(self._first_deadline, deadline)

    def take_admitted(self, key: AttemptKey) -> Admit | None:
        """Hands out a request and forgets it."""
        admitted = self._admitted.pop(key, None)
        return admitted.admit if admitted else None

    def mark_ended(self, key: AttemptKey) -> None:
        """The attempt is over: whatever still comes for it is late."""
        self._admitted.pop(key, None)
        self._ended[key] = None
        if len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended(self, key: AttemptKey) -> bool:
        return key in self._ended

    def attempts(self) -> list[AttemptKey]:
        return list(self._admitted)

    def take_expired(self) -> list[AttemptKey]:
        """Forgets the requests whose time is over."""
        now = self._clock()
        if now < self._first_deadline:
            return []
        expired = [key for key, admitted in self._admitted.items() if now >= admitted.deadline]
        for key in expired:
            del self._admitted[key]
        self._first_deadline = min((admitted.deadline for admitted in self._admitted.values()), default=math.inf)
        return expired

    def next_deadline(self) -> float | None:
        """When to look again; no request's time is over before."""
        return self._first_deadline if self._admitted else None
