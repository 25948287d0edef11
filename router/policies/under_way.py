"""Prefixes that workers are to compute but have not reported as cached."""

import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from tandem.router.workers.worker import Worker

# Seconds for which prefixes are expected after their request's end. Workers report pages 0.1 s after caching them.
LAST_WORD_S = 1.0
NOTHING: Set[int] = frozenset()


@dataclass(slots=True)
class _Expected:
    """Attributes: until: time at which the prefixes are dropped, once the request has ended."""

    identities: Sequence[int]
    until: float = math.inf


class _AtWorker:
    def __init__(self) -> None:
        # Whole-set operations: a loop over the pages of a long prompt is slow.
        self.pages: set[int] = set()
        # Number of further requests that share a page.
        self._again: Counter[int] = Counter()
        self.by_request: dict[str, _Expected] = {}
        # The worker's message number at the last check, and the time of the next check.
        self.num_messages = -1
        self.look_at = math.inf

    def add(self, request_id: str, identities: Sequence[int]) -> None:
        self.by_request[request_id] = _Expected(identities)
        own = set(identities)
        self._again.update(self.pages & own)
        self.pages |= own

    def drop(self, request_id: str) -> None:
        expected = self.by_request.pop(request_id, None)
        if expected is None:
            return
        own, again = set(expected.identities), self._again
        shared = again.keys() & own
        self.pages -= own - shared
        for identity in shared:
            if again[identity] > 1:
                again[identity] -= 1
            else:
                del again[identity]


class PrefixesUnderWay:
    """Without expected prefixes a worker that is computing one would look idle. Once a worker reports a prefix, only
    its reports count: pages evicted while their request still runs are gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Keyed by Worker, which is faster than by id: every choice looks up every worker.
        self._workers: dict[Worker, _AtWorker] = {}

    def __len__(self) -> int:
        return sum(len(at.by_request) for at in self._workers.values())

    def expect(self, worker: Worker, request_id: str, identities: Sequence[int]) -> None:
        at = self._workers.setdefault(worker, _AtWorker())
        at.drop(request_id)
        if identities and identities[-1] not in worker.prefixes.identities:
            at.add(request_id, identities)

    def finish(self, worker: Worker, request_id: str, identities: Sequence[int]) -> None:
        """Keeps the prefixes for LAST_WORD_S, in which the worker reports them."""
        if (at := self._workers.get(worker)) is not None:
            self.expect(worker, request_id, identities)
            if (expected := at.by_request.get(request_id)) is not None:
                expected.until = self._clock() + LAST_WORD_S
                at.look_at = min(at.look_at, expected.until)

    def give_up(self, worker: Worker, request_id: str) -> None:
        """Drops a request that the worker may not compute."""
        if (at := self._workers.get(worker)) is not None:
            at.drop(request_id)

    def forget(self, worker: Worker) -> None:
        self._workers.pop(worker, None)

    def expected(self, worker: Worker) -> Set[int]:
        return self.all_expected().get(worker, NOTHING)

    def all_expected(self) -> dict[Worker, Set[int]]:
        now = self._clock()
        expected: dict[Worker, Set[int]] = {}
        for worker, at in self._workers.items():
            if not at.by_request:
                continue
            prefixes = worker.prefixes
            if at.num_messages != prefixes.num_messages or now >= at.look_at:
                at.num_messages = prefixes.num_messages
                self._settle(at, prefixes.identities, now)
            if at.pages:
                expected[worker] = at.pages
        return expected

    def _settle(self, at: _AtWorker, cached: Set[int], now: float) -> None:
        """Drops requests that the worker has reported or that are overdue."""
        settled = [
            request_id
            for request_id, expected in at.by_request.items()
            if expected.identities[-1] in cached or now >= expected.until
        ]
        for request_id in settled:
            at.drop(request_id)
        at.look_at = min((expected.until for expected in at.by_request.values()), default=math.inf)
