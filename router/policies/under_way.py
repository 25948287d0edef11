"""Prefixes that workers are going to have: those of requests that they have been sent and have not told of yet."""

import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from tandem.router.workers.worker import Worker

# A request's pages are told of a tenth of a second after they are cached; so long, and longer, its end may be ahead.
LAST_WORD_S = 1.0
NOTHING: Set[int] = frozenset()


@dataclass(slots=True)
class _Expected:
    """Attributes: identities: of a request's prefixes, the shortest first; until: when they are given up, once their
    request has ended."""

    identities: Sequence[int]
    until: float = math.inf


class _AtWorker:
    """What is expected of one life of a worker."""

    def __init__(self) -> None:
        # Sets are put together and taken apart at once, a page at a time is slow: of a long prompt there are many.
        self.pages: set[int] = set()
        # Of those that several requests are to have: how many requests beside the first.
        self._again: Counter[int] = Counter()
        self.by_request: dict[str, _Expected] = {}
        # When the worker was last seen to have spoken, and when the first of them is to be given up.
        self.num_messages = -1
        self.look_at = math.inf

    def add(self, request_id: str, identities: Sequence[int]) -> None:
        """A request of which nothing is expected so far."""
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
    """Without these, a worker that is computing a prefix would seem no nearer to having it than one that is not. What a
    worker has said that it has cached is not expected of it any more: from then on its own word counts, and pages that
    it evicts while their request still runs are gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By workers and not by their names, which takes longer: this is asked for every worker at every choice.
        self._workers: dict[Worker, _AtWorker] = {}

    def __len__(self) -> int:
        """Requests of which something is expected, at each of their workers."""
        return sum(len(at.by_request) for at in self._workers.values())

    def expect(self, worker: Worker, request_id: str, identities: Sequence[int]) -> None:
        """A worker is sent a request: it is going to have these prefixes, the shortest first."""
        at = self._workers.setdefault(worker, _AtWorker())
        at.drop(request_id)
        if identities and identities[-1] not in worker.prefixes.identities:
            at.add(request_id, identities)

    def finish(self, worker: Worker, request_id: str, identities: Sequence[int]) -> None:
        """It has computed them, and will say so soon."""
        if (at := self._workers.get(worker)) is not None:
            self.expect(worker, request_id, identities)
            if (expected := at.by_request.get(request_id)) is not None:
                expected.until = self._clock() + LAST_WORD_S
                at.look_at = min(at.look_at, expected.until)

    def give_up(self, worker: Worker, request_id: str) -> None:
        """It is not going to have them, or nobody knows."""
        if (at := self._workers.get(worker)) is not None:
            at.drop(request_id)

    def forget(self, worker: Worker) -> None:
        """It is gone."""
        self._workers.pop(worker, None)

    def expected(self, worker: Worker) -> Set[int]:
        """The prefixes that a worker is going to have, beside those that it says it has."""
        return self.all_expected().get(worker, NOTHING)

    def all_expected(self) -> dict[Worker, Set[int]]:
        """Those of each worker of which any are expected."""
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
        """Drops what the worker has told of, and what it will not tell of."""
        settled = [
            request_id
            for request_id, expected in at.by_request.items()
            if expected.identities[-1] in cached or now >= expected.until
        ]
        for request_id in settled:
            at.drop(request_id)
        at.look_at = min((expected.until for expected in at.by_request.values()), default=math.inf)
