"""What a decode worker remembers of requests that have no pages here: those to come, and those that have ended."""

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
    """A request that the router has announced, and until when it is remembered without a lease."""

    admit: Admit
    deadline: float


class Admissions:
    """Requests that the router has announced, each until it has a lease, ends, or its time is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._admitted: dict[AttemptKey, _Admitted] = {}
        self._ended: OrderedDict[AttemptKey, None] = OrderedDict()

    def find_admitted(self, key: AttemptKey) -> Admit | None:
        """The request, if it is announced and has no lease yet."""
        admitted = self._admitted.get(key)
        return admitted.admit if admitted else None

    def remember_admitted(self, admit: Admit) -> None:
        """Remembers a request for as long as it says."""
        self._admitted[admit.request_id, admit.attempt] = _Admitted(admit, self._clock() + admit.duration_s)

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

    def expired(self) -> list[AttemptKey]:
        now = self._clock()
        return [key for key, admitted in self._admitted.items() if now >= admitted.deadline]

    def deadlines(self) -> list[float]:
        return [admitted.deadline for admitted in self._admitted.values()]
