"""Requests without pages on a decode worker: admitted and ended ones."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tandem.messages import Admit

# Ended attempts remembered, to refuse their late lease requests.
NUM_ENDED_REMEMBERED = 4096

# (request id, attempt number)
AttemptKey = tuple[str, int]


@dataclass(eq=False, slots=True)
class _Admitted:
    admit: Admit
    deadline: float


class Admissions:
    """Admitted requests, each until its lease is requested, it ends, or it expires."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._admitted: dict[AttemptKey, _Admitted] = {}
        # Lower bound of all deadlines, so that most steps need no scan.
        self._first_deadline = math.inf
        self._ended: OrderedDict[AttemptKey, None] = OrderedDict()

    def find_admitted(self, key: AttemptKey) -> Admit | None:
        admitted = self._admitted.get(key)
        return admitted.admit if admitted else None

    def remember_admitted(self, admit: Admit) -> None:
        deadline = self._clock() + admit.duration_s
        self._admitted[admit.request_id, admit.attempt] = _Admitted(admit, deadline)
        self._first_deadline = min(self._first_deadline, deadline)

    def take_admitted(self, key: AttemptKey) -> Admit | None:
        admitted = self._admitted.pop(key, None)
        return admitted.admit if admitted else None

    def mark_ended(self, key: AttemptKey) -> None:
        self._admitted.pop(key, None)
        self._ended[key] = None
        if len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended(self, key: AttemptKey) -> bool:
        return key in self._ended

    def attempts(self) -> list[AttemptKey]:
        return list(self._admitted)

    def take_expired(self) -> list[AttemptKey]:
        now = self._clock()
        if now < self._first_deadline:
            return []
        expired = [key for key, admitted in self._admitted.items() if now >= admitted.deadline]
        for key in expired:
            del self._admitted[key]
        self._first_deadline = min((admitted.deadline for admitted in self._admitted.values()), default=math.inf)
        return expired

    def next_deadline(self) -> float | None:
        return self._first_deadline if self._admitted else None
