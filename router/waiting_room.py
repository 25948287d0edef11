"""The queue of requests that no pair of workers takes now (docs/requests.md, "Waiting for workers").

- Binding is late: a worker takes waiting requests only while fewer than MAX_STARTING of its requests lack a token from
  the decode worker. So the first worker that comes back does not take them all.
- Suspects (router/attempts.py) go one at a time to each worker, first to workers that they were not lost on. Each waits
  SUSPECT_REST_S first: when several workers die at once, all losses are then known, and no suspect is blamed for a
  worker that was already dead.
- Patience: a request fails after `timeout_s()` without any pair. While there is a pair, only its own deadline counts. A
  draining router has no patience.
- Room: a new request is refused beyond `max_bytes`. A request in service always enters: it holds the same memory
  wherever it waits.
"""

import bisect
from collections.abc import Callable
from operator import attrgetter

from tandem.router.errors import OverloadedError
from tandem.router.observe.metrics import RouterMetrics
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.tracker import RequestTracker
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Worker
from tandem.router.workers.worker_registry import WorkerRegistry

MAX_STARTING = 16
SUSPECT_REST_S = 1.0
# A token id is an object in two sequences; the frontend's input takes about as much again.
BYTES_PER_TOKEN = 64
# Request without a prompt: its objects, its task and its connection's call.
BYTES_PER_REQUEST = 16 * 1024

_by_age = attrgetter("number")


class WaitingRoom:
    """Belongs to the router's loop.

    Attributes:
        is_due: True if something has happened since `take_next` last found nothing.
        num_tokens: tokens to prefill of its requests.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        timeout_s: Callable[[], float],
        max_bytes: int,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        # Each sorted by age. Prompts that are only embedded wait apart: they need no decode worker, so no request that
        # does may hold them up.
        self._queues: dict[tuple[bool, bool], list[ActiveRequest]] = {
            (is_suspect, embeds): [] for is_suspect in (True, False) for embeds in (False, True)
        }
        self._num_bytes = 0
        self.num_tokens = 0
        self._no_pair_since: float | None = None
        self.is_due = False

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def has_patience(self) -> bool:
        """True if requests may wait for missing workers."""
        return self._timeout_s() > 0

    def lose_patience(self) -> list[ActiveRequest]:
        """Returns the requests that wait for missing workers."""
        self._timeout_s = lambda: 0.0
        return self.find_overdue()

    def check_space(self, tracker: RequestTracker | None = None) -> None:
        """Raises OverloadedError if a new request would have to wait without room. Args: tracker: None: size
        unknown."""
        if self._registry.serves(embeds=tracker is not None and tracker.embeds) and not self:
            return
        num_bytes = BYTES_PER_REQUEST if tracker is None else _held_bytes(tracker)
        if self._num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"{len(self)} requests wait for a worker and hold as much memory as they may; try again later"
            )

    def enter(self, request: ActiveRequest) -> None:
        request.waiting_since = self._clock()
        request.waiting_bytes = _held_bytes(request.tracker)
        self._num_bytes += request.waiting_bytes
        request.waiting_tokens = _num_tokens(request.tracker)
        self.num_tokens += request.waiting_tokens
        bisect.insort(self._queue_of(request), request, key=_by_age)
        self.is_due = True

    def leave(self, request: ActiveRequest) -> None:
        if request.waiting_since is None:
            return
        queue = self._queue_of(request)
        del queue[bisect.bisect_left(queue, request.number, key=_by_age)]
        self._num_bytes -= request.waiting_bytes
        self.num_tokens -= request.waiting_tokens
        self._metrics.worker_wait.observe(self._clock() - request.waiting_since)
        request.waiting_since = None

    def take_next(self) -> tuple[ActiveRequest, Candidates] | None:
        """Removes and returns the oldest request that can be served now, with its candidates."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        # Suspects are few and older than most.
        for request in sorted(heads, key=lambda head: (not head.is_suspect, head.number)):
            if self._has_rested(request) and (candidates := self._candidates_for(request)):
                self.leave(request)
                return request, candidates
        # No event announces that a suspect has rested.
        self.is_due = any(queue for (is_suspect, _), queue in self._queues.items() if is_suspect)
        return None

    def find_overdue(self, timeout_s: float | None = None) -> list[ActiveRequest]:
        """Returns the requests that have waited too long. Call it regularly.

        Args:
            timeout_s: time without any pair; None: the usual one.
        """
        now = self._clock()
        if self._registry.is_ready:
            self._no_pair_since = None
            return []
        if self._no_pair_since is None:
            self._no_pair_since = now
        since = self._no_pair_since
        timeout_s = self._timeout_s() if timeout_s is None else timeout_s
        waiting = [r for queue in self._queues.values() for r in queue]
        overdue = [r for r in waiting if now - max(r.waiting_since or 0.0, since) >= timeout_s]
        return [r for r in overdue if not self._registry.serves(embeds=r.tracker.embeds)]

    def _has_rested(self, request: ActiveRequest) -> bool:
        since = request.waiting_since
        return not request.is_suspect or since is None or self._clock() - since >= SUSPECT_REST_S

    def _candidates_for(self, request: ActiveRequest) -> Candidates | None:
        embeds = request.tracker.embeds
        if not self._registry.serves(embeds=embeds):
            return None
        candidates = self._registry.candidates_for(embeds=embeds)
        if not request.is_suspect:
            return candidates.among(_takes_more) or None
        lost_on = request.lost_on
        elsewhere = candidates.among(lambda worker: _takes_suspect(worker) and worker.worker_id not in lost_on)
        return elsewhere or candidates.among(_takes_suspect) or None

    def _queue_of(self, request: ActiveRequest) -> list[ActiveRequest]:
        return self._queues[request.is_suspect, request.tracker.embeds]


def _takes_more(worker: Worker) -> bool:
    return worker.num_starting < MAX_STARTING


def _takes_suspect(worker: Worker) -> bool:
    return not worker.num_suspects and worker.num_starting < MAX_STARTING


def _num_tokens(tracker: RequestTracker) -> int:
    return len(tracker.prompt_ids) + len(tracker.output_ids)


def _held_bytes(tracker: RequestTracker) -> int:
    sampling = tracker.sampling
    num_named = 2 * len(sampling.logit_bias) + len(sampling.allowed_token_ids)
    return BYTES_PER_REQUEST + BYTES_PER_TOKEN * (_num_tokens(tracker) + num_named)
