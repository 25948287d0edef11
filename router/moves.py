"""Moves of running streams from leaving workers to others (docs/requests.md, "Moves")."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tandem.messages import Admit, Move, NotMoved
from tandem.router.observe.metrics import RouterMetrics
from tandem.router.policies import cost_model
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.requests_in_hand import RequestsInHand
from tandem.router.requests.tracker import RequestState
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.worker import Pair, Worker
from tandem.router.workers.worker_registry import WorkerRegistry

# Minimum time between two orders for one request, in seconds.
MOVE_AGAIN_S = 30.0
# Streams of this router that leave one worker at a time: their prompts go before all others there.
MAX_AT_ONCE = 2
# Lifetime of the announcement of pages, in seconds.
ADMIT_S = 5.0
# Limit for the worker's answer, in seconds; its own limit is shorter.
ANSWER_S = 10.0


@dataclass(eq=False, slots=True)
class StreamMove:
    """A move that was ordered and has not ended.

    Attributes:
        pair: the leaving worker, which prefills the next attempt, and the worker that decodes it.
        attempt: attempt that moves.
        ordered_at: on the router's clock.
        has_left: the stream was given back; its next attempt runs.
    """

    pair: Pair
    attempt: int
    ordered_at: float
    has_left: bool = False


class Moves:
    """Orders moves. The rest of a move is a given-back attempt and the next one, whose workers are given.

    A worker refuses to move its oldest request, which it never gives back.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        requests: RequestsInHand,
        metrics: RouterMetrics,
        objectives: Objectives,
        clock: Callable[[], float],
        make_id: Callable[[], str],
    ) -> None:
        """
        Args:
            make_id: makes an id of this router, for pages that go ahead.
        """
        self._registry = registry
        self._requests = requests
        self._metrics = metrics
        self._objectives = objectives
        self._clock = clock
        self._make_id = make_id
        self._open: dict[ActiveRequest, StreamMove] = {}

    def look(self) -> None:
        """Orders moves of the streams on leaving workers, and gives up overdue ones."""
        now = self._clock()
        for request, move in list(self._open.items()):
            if not move.has_left and now >= move.ordered_at + ANSWER_S:
                self._end(request, "late")
        leaving = {w for w in self._registry if _has_links(w) and not self._registry.stays(w)}
        if not any(worker.assigned_here.num_decoding for worker in leaving):
            return
        num_moving = Counter(move.pair.prefill for move in self._open.values())
        for request in self._requests:
            pair = request.pair
            if pair is None or pair.decode not in leaving or num_moving[pair.decode] >= MAX_AT_ONCE:
                continue
            if self._may_move(request, now) and (destination := self._find_place(pair.decode, request)) is not None:
                num_moving[pair.decode] += 1
                self._order(request, Pair(pair.decode, destination), now)

    def refused(self, request: ActiveRequest, message: NotMoved) -> None:
        move = self._open.get(request)
        if move is not None and move.attempt == message.attempt and not move.has_left:
            self._end(request, message.reason)
            self.look()

    def leave(self, request: ActiveRequest, attempt: int) -> Pair | None:
        """Returns the workers of the next attempt of a stream that was given back to move; None: it may go anywhere."""
        move = self._open.get(request)
        if move is None or move.attempt != attempt:
            return None
        if not self._is_possible(move.pair):
            self._end(request, "lost")
            return None
        move.has_left = True
        return move.pair

    def attempt_arrived(self, request: ActiveRequest) -> None:
        """The decode worker of an attempt has sent tokens."""
        move = self._open.get(request)
        if move is not None and move.has_left:
            self._metrics.move_seconds.observe(self._clock() - move.ordered_at)
            self._end(request, "moved")
            self.look()

    def attempt_ended(self, request: ActiveRequest) -> None:
        """An attempt has ended, except by the give-back of its move."""
        move = self._open.get(request)
        if move is not None:
            self._end(request, "lost" if move.has_left else "ended")

    def _may_move(self, request: ActiveRequest, now: float) -> bool:
        tracker = request.tracker
        is_running = tracker.state is RequestState.RUNNING and tracker.decode_has_spoken
        is_due = now >= request.may_move_at and request not in self._open
        return is_running and is_due and not request.num_losses and not tracker.lacks_prompt_logprobs

    def _find_place(self, source: Worker, request: ActiveRequest) -> Worker | None:
        """Returns the linked worker where the stream costs all requests the least."""
        num_tokens = len(request.tracker.prompt_ids) + len(request.tracker.output_ids)
        best, least = None, math.inf
        for worker in self._registry:
            if self._is_possible(Pair(source, worker)):
                load, speed = cost_model.state_of(worker)
                cost = sum(cost_model.decode_parts(load, speed, self._objectives, num_tokens, num_tokens).values())
                if cost < least:
                    best, least = worker, cost
        return best

    def _is_possible(self, pair: Pair) -> bool:
        source, destination = pair.prefill, pair.decode
        are_here = all(self._registry.get(worker.worker_id) is worker for worker in (source, destination))
        is_linked = source.links_up.get(destination.worker_id) == destination.incarnation
        return are_here and is_linked and _has_links(destination) and self._registry.stays(destination)

    def _order(self, request: ActiveRequest, pair: Pair, now: float) -> None:
        tracker, spec = request.tracker, request.tracker.spec
        request.may_move_at = now + MOVE_AGAIN_S
        self._open[request] = StreamMove(pair, tracker.attempt, now)
        token_ids = (*tracker.prompt_ids, *tracker.output_ids)
        # The KV of the last token is not computed yet.
        num_tokens = (len(token_ids) - 1) // pair.prefill.page_size * pair.prefill.page_size
        copy_id = self._make_id()
        admit = Admit(
            copy_id,
            0,
            token_ids[:num_tokens],
            (),
            tracker.sampling.without_prompt_logprobs(),
            ADMIT_S,
            tracker.arrival_ns,
            spec.priority,
            spec.cache_namespace,
            client=spec.client,
            prefill_worker_id=pair.prefill.worker_id,
            copy_of=tracker.request_id,
            adapter=spec.adapter,
        )
        pair.decode.send([admit])
        move = Move(
            tracker.request_id, tracker.attempt, copy_id, pair.decode.worker_id, num_tokens, spec.cache_namespace
        )
        pair.prefill.send([move])

    def _end(self, request: ActiveRequest, result: str) -> None:
        del self._open[request]
        self._metrics.move_ended(result)


def _has_links(worker: Worker) -> bool:
    return worker.role == "both" and worker.hello.has_links
