"""What a decode worker remembers of requests that have no pages here: those to come, and those that have ended."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tandem.messages import Admit

# How many ended attempts are remembered, to refuse their late lease requests at once.
NUM_ENDED_REMEMBERED = 4096

# A request's id and its attempt.
AttemptKey = tuple[str, int]


@dataclass(eq=False, slots=True)
class _Admitted:
    admit: Admit
    deadline: float


class Admissions:
    """Requests that the router has announced, each until it has a lease, ends, or its time is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._admitted: dict[AttemptKey, _Admitted] = {}
        self._ended: OrderedDict[AttemptKey, None] = OrderedDict()

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._admitted

    def __getitem__(self, key: AttemptKey) -> Admit:
        return self._admitted[key].admit

    def add(self, admit: Admit) -> None:
        self._admitted[admit.request_id, admit.attempt] = _Admitted(admit, self._clock() + admit.duration_s)

    def take(self, key: AttemptKey) -> Admit | None:
        """Hands out a request and forgets it."""
        admitted = self._admitted.pop(key, None)
        return admitted.admit if admitted else None

    def end(self, key: AttemptKey) -> None:
        """The attempt is over: whatever still comes for it is late."""
        self._admitted.pop(key, None)
        self._ended[key] = None
        if len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended(self, key: AttemptKey) -> bool:
        return key in self._ended

    def attempts(self) -> list[AttemptKey]:
        return list(self._admitted)

    def expired(self) -> list[AttemptKey]:
        now = self._clock()
        return [key for key, admitted in self._admitted.items() if now >= admitted.deadline]

    def deadlines(self) -> list[float]:
        return [admitted.deadline for admitted in self._admitted.values()]
