"""The lease requests that a decode worker cannot answer yet, and the order in which they are granted."""

import bisect
import itertools
import math
from collections.abc import Callable

from tandem.decode_worker.admissions import AttemptKey
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.lease import Lease, LeaseState
from tandem.kvtransfer.receiver_link import ReceiverLink
from tandem.messages import Admit
from tandem.priority import virtual_arrival_ns

# So many that do not fit are passed over to look for one that does: a step's work must not grow with the line.
MAX_PASSED_OVER = 32
# Who was sent away for want of room asks again after half a second, unless its worker stands still.
KEEP_SENT_AWAY_S = 60.0


class WaitingLeases:
    """Those that are parked until their Admit comes, and those that stand in line for pages, by age and priority.

    A request whose attempt has ended in the line keeps its place: from the Admit of its next attempt on, nobody goes
    before it who stands behind that place, for as long as its lease request may take to follow.
    """

    def __init__(self, clock: Callable[[], float], config: DecodeConfig) -> None:
        self._clock = clock
        self._grace_s = config.admit_grace_s
        self._max_overtaken = config.max_overtaken
        self._max_waiting = config.max_waiting
        self._numbers = itertools.count()
        self._by_id: dict[str, Lease] = {}
        self._by_key: dict[AttemptKey, Lease] = {}
        # They stand in order of their deadlines.
        self._parked: dict[str, Lease] = {}
        self._line: list[Lease] = []
        # Requests whose attempt ended in the line, each until the time at which it is forgotten.
        self._left: dict[str, float] = {}
        # Places of attempts that are announced and have not asked yet: where they stand, and until when.
        self._held: dict[AttemptKey, tuple[int, float]] = {}
        # How often those have been overtaken for whom there was no room, and until when that is kept.
        self._sent_away: dict[AttemptKey, tuple[int, float]] = {}
        # Whether the line has changed since it was last looked through, and how many pages there were then.
        self._changed = False
        self._num_available = 0
        # Where the first of this worker's own prompts stands that wait for pages, and how many leases that stand behind
        # it were granted since one of them last got some.
        self._prompt: int | None = None
        self._num_prompt_overtaken = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, lease_id: str) -> Lease | None:
        return self._by_id.get(lease_id)

    def of_attempt(self, key: AttemptKey) -> Lease | None:
        return self._by_key.get(key)

    def of_link(self, link: ReceiverLink) -> list[Lease]:
        return [waiting for waiting in self._by_id.values() if waiting.link is link]

    def attempts(self) -> list[AttemptKey]:
        return list(self._by_key)

    def announce(self, admit: Admit) -> Lease | None:
        """An Admit has come; returns the lease that was parked for it, if any."""
        key = admit.request_id, admit.attempt
        waiting = self._by_key.get(key)
        if waiting is None and self._left.pop(admit.request_id, None) is not None:
            standing = virtual_arrival_ns(admit.arrival_ns, admit.priority)
            self._held[key] = standing, self._clock() + self._grace_s
        return waiting

    def park(self, waiting: Lease) -> bool:
        """Keeps a lease until its Admit comes; returns whether there was room for it."""
        if len(self) >= self._max_waiting:
            return False
        waiting.deadline = self._clock() + self._grace_s
        self._by_id[waiting.lease_id] = self._by_key[waiting.key] = self._parked[waiting.lease_id] = waiting
        return True

    def line_up(self, waiting: Lease, admit: Admit) -> Lease | None:
        """Puts a lease where its request belongs; returns the one that there is no room for any more, if any."""
        self._parked.pop(waiting.lease_id, None)
        self._held.pop(waiting.key, None)
        waiting.state = LeaseState.QUEUED
        waiting.admit = admit
        waiting.place = virtual_arrival_ns(admit.arrival_ns, admit.priority), next(self._numbers)
        waiting.num_overtaken = self._max_overtaken if admit.attempt else self._sent_away.pop(waiting.key, (0, 0.0))[0]
        self._by_id[waiting.lease_id] = self._by_key[waiting.key] = waiting
        bisect.insort(self._line, waiting, key=_place)
        self._changed = True
        if len(self) <= self._max_waiting:
            return None
        last = self._line[-1]
        self.remove(last)
        # It asks again soon, and what has overtaken it before counts.
        self._sent_away[last.key] = last.num_overtaken, self._clock() + KEEP_SENT_AWAY_S
        return last

    def remove(self, waiting: Lease) -> None:
        """It is answered, or nobody wants it any more."""
        del self._by_id[waiting.lease_id], self._by_key[waiting.key]
        if waiting.state is LeaseState.PARKED:
            del self._parked[waiting.lease_id]
        else:
            del self._line[bisect.bisect_left(self._line, waiting.place, key=_place)]
            self._changed = True

    def end_attempt(self, key: AttemptKey) -> Lease | None:
        """The router has ended an attempt; returns its lease, if one was waiting. If it stood in line, the request's
        next attempt, which is announced at once if there is one, finds the place held."""
        if self._held.pop(key, None) is not None:
            self._changed = True
        waiting = self._by_key.get(key)
        if waiting is not None:
            if waiting.state is LeaseState.QUEUED:
                self._left[waiting.admit.request_id] = self._clock() + self._grace_s
            self.remove(waiting)
        return waiting

    def take_overdue(self) -> list[Lease]:
        """Takes out the leases whose Admit has not come, and lets places go that have been held for long enough."""
        now = self._clock()
        overdue: list[Lease] = []
        for waiting in self._parked.values():
            if now < waiting.deadline:
                break
            overdue.append(waiting)
        for waiting in overdue:
            self.remove(waiting)
        if self._sent_away:
            self._sent_away = {key: sent for key, sent in self._sent_away.items() if now < sent[1]}
        if self._left:
            self._left = {request_id: until for request_id, until in self._left.items() if now < until}
        if self._held:
            held = {key: place for key, place in self._held.items() if now < place[1]}
            self._changed = self._changed or len(held) < len(self._held)
            self._held = held
        return overdue

    def next_deadline(self) -> float | None:
        """When `take_overdue` has something to do next."""
        deadlines = [until for _, until in self._held.values()]
        if self._parked:
            deadlines.append(next(iter(self._parked.values())).deadline)
        return min(deadlines, default=None)

    @property
    def first_place(self) -> int | None:
        """Where the first of those in line stands."""
        return self._line[0].place[0] if self._line else None

    def note_prompts(self, first: int | None, *, has_started: bool) -> None:
        """Says which of this worker's own prompts wait for pages of the same pool. Leases overtake them as often as
        each other, and then those behind the first of them wait until one has got its pages.

        Args:
            first: where the first of them stands; None: none waits, or not for pages that leases could be granted.
            has_started: one has got its pages since the last call.
        """
        was_limit = self._prompt_limit
        self._prompt = first
        if has_started:
            self._num_prompt_overtaken = 0
        self._changed = self._changed or self._prompt_limit != was_limit

    @property
    def _prompt_limit(self) -> float:
        """Leases that stand behind it wait."""
        if self._prompt is None or self._num_prompt_overtaken < self._max_overtaken:
            return math.inf
        return self._prompt

    def look_again(self) -> None:
        """More may fit now in as many pages: what is cached has grown."""
        self._changed = True

    def grant_in_order(self, num_available: Callable[[], int], grant: Callable[[Lease], bool]) -> None:
        """Goes through the line unless nothing has changed: neither the line nor, upwards, the number of pages.

        A lease that fits may overtake those that do not, but each of them only so often: then all wait until
        it has its pages.

        Args:
            num_available: pages that may be granted now.
            grant: tries to grant one; returns whether it did.
        """
        if not self._changed and num_available() <= self._num_available:
            return
        self._changed = False
        passed_over: list[Lease] = []
        granted: list[Lease] = []
        held = min((standing for standing, _ in self._held.values()), default=math.inf)
        for waiting in self._line:
            if waiting.place[0] > min(held, self._prompt_limit):
                break
            if grant(waiting):
                granted.append(waiting)
                if self._prompt is not None and waiting.place[0] > self._prompt:
                    self._num_prompt_overtaken += 1
                for other in passed_over:
                    other.num_overtaken += 1
            else:
                passed_over.append(waiting)
            if len(passed_over) == MAX_PASSED_OVER or any(p.num_overtaken >= self._max_overtaken for p in passed_over):
                break
        for waiting in granted:
            self.remove(waiting)
        self._changed = False
        self._num_available = num_available()


def _place(waiting: Lease) -> tuple[int, int]:
    return waiting.place
