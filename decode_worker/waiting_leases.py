"""Lease requests that wait on a decode worker, and their order."""

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

# Leases passed over to find one that fits: bounds a step's work.
MAX_PASSED_OVER = 32
# Time for which a refused lease's count is kept; its sender normally asks again after 0.5 s.
KEEP_SENT_AWAY_S = 60.0


class WaitingLeases:
    """Leases parked until their Admit comes, and leases queued for pages, by age and priority.

    A request keeps its place across attempts: from the next Admit, no lease behind it is granted until its LeaseRequest
    comes or the grace period ends.
    """

    def __init__(self, clock: Callable[[], float], config: DecodeConfig) -> None:
        self._clock = clock
        self._grace_s = config.admit_grace_s
        self._max_overtaken = config.max_overtaken
        self._max_waiting = config.max_waiting
        self._numbers = itertools.count()
        self._by_id: dict[str, Lease] = {}
        self._by_key: dict[AttemptKey, Lease] = {}
        # In order of their deadlines.
        self._parked: dict[str, Lease] = {}
        self._queue: list[Lease] = []
        # Requests whose attempt ended in the queue, with their expiry.
        self._left: dict[str, float] = {}
        # (place, expiry) of announced attempts without a LeaseRequest.
        self._held: dict[AttemptKey, tuple[int, float]] = {}
        # (num_overtaken, expiry) of leases refused because the queue was full.
        self._sent_away: dict[AttemptKey, tuple[int, float]] = {}
        # Whether the queue changed since the last scan, and the available pages then.
        self._changed = False
        self._num_available = 0
        # Place of the first local prompt without pages, and younger leases granted since a prompt got pages.
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
        """Notes an Admit. Returns the lease parked for it, if any."""
        key = admit.request_id, admit.attempt
        waiting = self._by_key.get(key)
        if waiting is None and self._left.pop(admit.request_id, None) is not None:
            standing = virtual_arrival_ns(admit.arrival_ns, admit.priority)
            self._held[key] = standing, self._clock() + self._grace_s
        return waiting

    def park(self, waiting: Lease) -> bool:
        """Parks a lease. Returns whether there was room."""
        if len(self) >= self._max_waiting:
            return False
        waiting.deadline = self._clock() + self._grace_s
        self._by_id[waiting.lease_id] = self._by_key[waiting.key] = self._parked[waiting.lease_id] = waiting
        return True

    def enqueue(self, waiting: Lease, admit: Admit) -> Lease | None:
        """Inserts a lease into the queue. Returns the last lease if the queue is over its limit."""
        self._parked.pop(waiting.lease_id, None)
        self._held.pop(waiting.key, None)
        waiting.state = LeaseState.QUEUED
        waiting.admit = admit
        waiting.place = virtual_arrival_ns(admit.arrival_ns, admit.priority), next(self._numbers)
        waiting.num_overtaken = self._max_overtaken if admit.attempt else self._sent_away.pop(waiting.key, (0, 0.0))[0]
        self._by_id[waiting.lease_id] = self._by_key[waiting.key] = waiting
        bisect.insort(self._queue, waiting, key=_place)
        self._changed = True
        if len(self) <= self._max_waiting:
            return None
        last = self._queue[-1]
        self.remove(last)
        self._sent_away[last.key] = last.num_overtaken, self._clock() + KEEP_SENT_AWAY_S
        return last

    def remove(self, waiting: Lease) -> None:
        del self._by_id[waiting.lease_id], self._by_key[waiting.key]
        if waiting.state is LeaseState.PARKED:
            del self._parked[waiting.lease_id]
        else:
            del self._queue[bisect.bisect_left(self._queue, waiting.place, key=_place)]
            self._changed = True

    def withdraw(self, waiting: Lease) -> None:
        """Forgets a lease that is answered without waiting for pages."""
        if self._held.pop(waiting.key, None) is not None:
            self._changed = True
        if waiting.lease_id in self._by_id:
            self.remove(waiting)

    def end_attempt(self, key: AttemptKey) -> Lease | None:
        """Ends an attempt and returns its waiting lease, if any. A queued request's place is held for its restart."""
        if self._held.pop(key, None) is not None:
            self._changed = True
        waiting = self._by_key.get(key)
        if waiting is not None:
            if waiting.state is LeaseState.QUEUED:
                self._left[waiting.admit.request_id] = self._clock() + self._grace_s
            self.remove(waiting)
        return waiting

    def take_overdue(self) -> list[Lease]:
        """Removes and returns parked leases without an Admit, and ends expired holds."""
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
        deadlines = [until for _, until in self._held.values()]
        if self._parked:
            deadlines.append(next(iter(self._parked.values())).deadline)
        return min(deadlines, default=None)

    @property
    def is_idle(self) -> bool:
        """Whether neither a lease nor a local prompt waits for pages."""
        return not self._queue and not self._held and self._prompt is None

    @property
    def first_place(self) -> int | None:
        return self._queue[0].place[0] if self._queue else None

    def note_prompts(self, first: int | None, *, has_started: bool) -> None:
        """Notes local prompts waiting for the same pool. After max_overtaken younger leases, leases behind the first
        prompt wait until a prompt gets pages.

        Args:
            first: place of the first waiting prompt; None if none waits for grantable pages.
            has_started: whether a prompt got pages since the last call.
        """
        was_limit = self._prompt_limit
        self._prompt = first
        if has_started:
            self._num_prompt_overtaken = 0
        self._changed = self._changed or self._prompt_limit != was_limit

    @property
    def _prompt_limit(self) -> float:
        """Leases behind this place wait."""
        if self._prompt is None or self._num_prompt_overtaken < self._max_overtaken:
            return math.inf
        return self._prompt

    def look_again(self) -> None:
        self._changed = True

    def grant_in_order(self, num_available: Callable[[], int], grant: Callable[[Lease], bool]) -> None:
        """Grants leases in order, if the queue changed or pages were freed.

        A lease that fits may overtake ones that do not, each at most max_overtaken times; then all later ones wait.

        Args:
            num_available: returns the pages that may be granted.
            grant: tries to grant a lease; returns whether it did.
        """
        if not self._changed and num_available() <= self._num_available:
            return
        self._changed = False
        passed_over: list[Lease] = []
        granted: list[Lease] = []
        held = min((standing for standing, _ in self._held.values()), default=math.inf)
        for waiting in self._queue:
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
