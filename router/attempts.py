"""Attempts to serve the requests in hand, with the rules for requests that may crash workers (docs/requests.md,
"Attempts").

- A lost worker charges its requests a loss, until each gets past its place at that time (`cleared_len`). A loss does
  not count against `max_attempts`.
- A link may report a decode worker's end before the worker's stream does. Attempts that fail without a link are
  therefore excused too, `max_attempts` times.
- After SUSPECT_AFTER losses a request is a suspect; each worker serves one at a time. A worker lost with a suspect was
  ended by it: the suspect fails, and the other requests are charged nothing.
- A worker on another host that was silent before its loss is out of reach: the host of a dead process reports its end
  at once. This loss is excused, `max_attempts` times in the same place.

So a request that crashes every worker ends three of them. A harmless one is never blamed twice in the same place: as
its worker's only suspect it gets past it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from tandem.lifecycle import ASSIGNED, LAST_TOKEN, WAITING, now_ns
from tandem.messages import (
    Embedded,
    Failed,
    Finished,
    FirstToken,
    GaveBack,
    LeaseLost,
    NotMoved,
    PrefillDeferred,
    Progress,
    PromptScored,
    TokenEvent,
    Unservable,
)
from tandem.router.config import RouterConfig
from tandem.router.errors import (
    InternalError,
    InvalidRequestError,
    RequestError,
    RequestTooLargeError,
    UnavailableError,
)
from tandem.router.moves import Moves
from tandem.router.observe.live.journal import Journal
from tandem.router.observe.metrics import RouterMetrics
from tandem.router.policies.base import AttemptFailure, RequestEnd, RoutingRequest
from tandem.router.policies.guard import GuardedPolicy
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.clock_offsets import ClockOffsets
from tandem.router.requests.requests_in_hand import RequestsInHand
from tandem.router.requests.tracker import RequestState, RequestTracker
from tandem.router.waiting_room import WaitingRoom
from tandem.router.workers.candidates import Candidates, PinnedCandidate
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.placement import Placed
from tandem.router.workers.prompt_count import PromptCount
from tandem.router.workers.worker import Pair, Worker
from tandem.router.workers.worker_registry import WorkerRegistry

logger = logging.getLogger(__name__)

# Messages about one attempt.
AttemptMessage = (
    Progress
    | PromptScored
    | FirstToken
    | Embedded
    | Finished
    | Failed
    | GaveBack
    | NotMoved
    | LeaseLost
    | PrefillDeferred
    | Unservable
)


class Attempts:
    """Serves requests, one attempt at a time."""

    def __init__(
        self,
        config: RouterConfig,
        policy: GuardedPolicy,
        registry: WorkerRegistry,
        requests: RequestsInHand,
        room: WaitingRoom,
        metrics: RouterMetrics,
        clocks: ClockOffsets,
        journal: Journal,
        clock: Callable[[], float],
        make_id: Callable[[], str],
    ) -> None:
        """
        Args:
            make_id: see Moves.
        """
        self._config = config
        self._policy = policy
        self._registry = registry
        self._requests = requests
        self._room = room
        self._metrics = metrics
        self._clocks = clocks
        self._journal = journal
        self._clock = clock
        self.prompts = PromptCount()
        self._objectives = Objectives.of_ms(config.ttft_objective_ms, config.itl_objective_ms)
        self.moves = Moves(registry, requests, metrics, self._objectives, clock, make_id)

    def start_attempt(self, request: ActiveRequest, move: Pair | None = None) -> None:
        """Args: move: workers of the attempt, if its stream moves."""
        tracker = request.tracker
        tracker.finish_if_whole()
        if tracker.state is RequestState.FINISHED:
            # The client lacked only the end.
            tracker.moments[LAST_TOKEN] = now_ns()
            self._end_request(request, "finished")
            return
        if request.num_failures >= self._config.max_attempts:
            self.fail_request(
                request, f"given up after {self._config.max_attempts} failed attempts: {request.last_failure}"
            )
            return
        if move is not None:
            self._assign(request, PinnedCandidate(move))
            return
        is_ready = self._registry.serves(embeds=tracker.embeds)
        if not is_ready and not self._room.has_patience:
            self.fail_request(request, self._registry.not_ready_reason(embeds=tracker.embeds))
        elif self._room or request.is_suspect or not is_ready:
            tracker.moments[WAITING] = now_ns()
            self._room.enter(request)
        else:
            self._assign(request, self._registry.candidates_for(embeds=tracker.embeds))

    def serve_waiting(self) -> None:
        while self._room.is_due and (taken := self._room.take_next()) is not None:
            self._assign(*taken)

    def give_up_waiting(self, requests: Iterable[ActiveRequest], why: str) -> None:
        for request in requests:
            self.fail_request(request, f"{self._registry.not_ready_reason(embeds=request.tracker.embeds)}; {why}")

    def _assign(self, request: ActiveRequest, candidates: Candidates) -> None:
        tracker = request.tracker
        # The pool sizes may have been unknown when the request came.
        refusal = self._registry.size_refusal(len(tracker.prompt_ids), tracker.max_output_tokens)
        if refusal and tracker.attempt < 0:
            self.fail_request(request, refusal, RequestTooLargeError)
            return
        view = self._routing_request(tracker, tracker.attempt + 1)
        try:
            pair = self._policy.choose(candidates, view)
        except InternalError as error:
            self.fail_request(request, str(error), InternalError)
            return
        decode_worker_id, placed = ("", None) if tracker.embeds else (pair.decode.worker_id, Placed.of(pair))
        admit, prefill = tracker.begin_attempt(
            pair.prefill.worker_id, decode_worker_id, self._config.admit_duration_s, placed
        )
        if view.adapter is not None:
            for worker in dict.fromkeys((pair.prefill, pair.decode)):
                worker.adapters.expect(view.adapter, self._clock())
        num_tokens = len(view.token_ids)
        self.prompts.add(num_tokens, pair.estimate)
        request.assign_pair(pair)
        tracker.moments[ASSIGNED] = now_ns()
        if admit is not None:
            pair.decode.send([admit])
            self._metrics.attempt_placed(pair)
        is_move = isinstance(candidates, PinnedCandidate)
        pair.prefill.send([replace(prefill, is_move=True) if is_move else prefill])
        self._policy.attempt_started(pair, view)

    def on_tokens(self, events: Iterable[TokenEvent]) -> None:
        now = self._clock()
        # Nearly all requests had tokens in the previous step, which makes many gaps equal.
        num_since: dict[float | None, int] = {}
        for event in events:
            request = self._requests.get(event.request_id)
            if request is None:
                continue
            token_ids = request.tracker.record_tokens(event)
            if token_ids:
                since, request.last_token_at = request.last_token_at, now
                num_since[since] = num_since.get(since, 0) + 1
            self._pass_on(request, token_ids)
        for since, num_gaps in num_since.items():
            if since is not None:
                self._metrics.itl.observe(now - since, num_gaps)

    def on_message(self, request: ActiveRequest, message: AttemptMessage) -> None:
        """Handles a worker's message; one about an earlier attempt has no effect."""
        match message:
            case Progress():
                self._stamp(request.tracker, message)
            case PromptScored():
                self._take_tokens(request, request.tracker.record_prompt_logprobs(message))
            case FirstToken():
                self._stamp(request.tracker, message)
                if request.pair is not None and request.tracker.is_current(message.attempt):
                    self._metrics.first_token_came(request.pair, request.tracker.moments)
                self._take_tokens(request, request.tracker.record_first_token(message))
            case Embedded():
                self._stamp(request.tracker, message)
                request.tracker.record_embedding(message)
                self._pass_on(request, [])
            case Finished():
                self._stamp(request.tracker, message)
                request.tracker.record_finished(message)
                self._pass_on(request, [])
            case Failed():
                failed = self._has_failed(request, message.attempt)
                self._retry(request, message.attempt, "prefill_failed", message.reason, failed=failed)
            case Unservable():
                if request.tracker.is_current(message.attempt):
                    self.fail_request(request, message.reason, InvalidRequestError)
            case GaveBack():
                # No failure: the oldest request is never given back, so it ends.
                if message.is_move:
                    self._move(request, message.attempt)
                else:
                    reason = "the decode worker ran out of pages"
                    self._retry(request, message.attempt, "given_back", reason, failed=False)
            case NotMoved():
                self.moves.refused(request, message)
            case LeaseLost():
                # With a deadline, this is the awaited answer after the loss of the prefill worker.
                failed = request.decode_deadline is None
                reason = "the decode worker lost the request's pages"
                self._retry(request, message.attempt, "lease_lost", reason, failed=failed)
            case PrefillDeferred():
                self._retry(request, message.attempt, "deferred", "the decode worker had no pages for it", failed=False)

    def _stamp(self, tracker: RequestTracker, message: Progress | FirstToken | Embedded | Finished) -> None:
        if tracker.is_current(message.attempt):
            self._clocks.stamp(tracker, message.moments)

    def end_with_worker(self, worker: Worker, reason: str, *, out_of_reach: bool = False) -> None:
        """Ends a lost worker's attempts.

        Args:
            out_of_reach: True if the worker may be alive behind a broken network.
        """
        reason = f"worker {worker.worker_id} was lost: {reason}"
        touched = []
        for request in self._requests:
            if worker not in request.workers:
                continue
            if request.pair is not None and worker is not request.pair.decode and request.tracker.has_first_token:
                # The decode worker may have all pages, and says so.
                request.decode_deadline = self._clock() + self._config.decode_word_timeout_s
                self._requests.await_decode(request)
            else:
                touched.append(request)
        innocent = {r.number for r in touched if out_of_reach and r.excuse_loss(self._config.max_attempts)}
        suspects = {request.number for request in touched if request.is_suspect} - innocent
        for request in touched:
            if request.number not in innocent and (not suspects or request.number in suspects):
                request.charge_loss(worker.worker_id)
            attempt = request.tracker.attempt
            if request.number not in suspects:
                self._retry(request, attempt, "worker_lost", reason, failed=False)
            elif self._end_attempt(request, attempt, "worker_lost", reason):
                logger.error("request %s has ended %d workers", request.tracker.request_id, request.num_losses)
                lost = f"given up: {request.num_losses} workers were lost while they served it"
                self.fail_request(request, lost, InternalError)

    def retry_without_word(self, request: ActiveRequest) -> None:
        reason = "the prefill worker was lost, and the decode worker says nothing"
        self._retry(request, request.tracker.attempt, "worker_lost", reason, failed=False)

    def fail_request(
        self, request: ActiveRequest, reason: str, failure_class: type[RequestError] = UnavailableError
    ) -> None:
        """Ends a request that cannot be served; its client can still read the output so far. No effect on an ended
        request, as for stop_request and abort_request."""
        if request.tracker.mark_failed(reason, failure_class):
            self._end_request(request, "failed")

    def stop_request(self, request: ActiveRequest) -> None:
        if request.tracker.mark_stopped():
            self._end_request(request, "stopped")

    def abort_request(self, request: ActiveRequest) -> None:
        if request.tracker.mark_aborted():
            self._end_request(request, "aborted")

    def _has_failed(self, request: ActiveRequest, attempt: int) -> bool:
        pair = request.pair
        if pair is None or not request.tracker.is_current(attempt):
            return False
        if request.tracker.embeds or pair.prefill.decode_workers.get(pair.decode.worker_id) is pair.decode:
            return True
        request.num_links_lost += 1
        return request.num_links_lost > self._config.max_attempts

    def _move(self, request: ActiveRequest, attempt: int) -> None:
        move = self.moves.leave(request, attempt)
        place = move.decode.worker_id if move is not None else "any worker"
        self._retry(request, attempt, "moved", f"the stream goes on at {place}", failed=False, move=move)

    def _retry(
        self,
        request: ActiveRequest,
        attempt: int,
        kind: AttemptFailure,
        reason: str,
        *,
        failed: bool = True,
        move: Pair | None = None,
    ) -> None:
        """Args: move: workers of the next attempt, if its stream moves."""
        if self._end_attempt(request, attempt, kind, reason):
            request.num_failures += failed
            if failed:
                request.last_failure = reason
            self._metrics.attempt_restarted(kind)
            self._journal.attempt_restarted(kind)
            self.start_attempt(request, move)

    def _end_attempt(self, request: ActiveRequest, attempt: int, kind: AttemptFailure, reason: str) -> bool:
        """Returns whether the request needs another attempt."""
        tracker = request.tracker
        if not tracker.is_current(attempt):
            return False
        logger.info("request %s attempt %d ended: %s", tracker.request_id, attempt, reason)
        pair = request.pair
        assert pair is not None
        request.release_pair(tell_workers=True)
        self._room.is_due = True
        if kind != "moved":
            self.moves.attempt_ended(request)
        tracker.end_attempt()
        self._policy.attempt_failed(pair, self._routing_request(tracker, attempt), kind, reason)
        if tracker.state is RequestState.FINISHED:
            self._end_request(request, "finished")
            return False
        return True

    def _take_tokens(self, request: ActiveRequest, token_ids: list[int]) -> None:
        if token_ids:
            since, request.last_token_at = request.last_token_at, self._clock()
            if since is not None:
                self._metrics.itl.observe(request.last_token_at - since)
        self._pass_on(request, token_ids)

    def _pass_on(self, request: ActiveRequest, token_ids: list[int]) -> None:
        """Acts on a message's effects."""
        tracker = request.tracker
        if token_ids:
            request.tokens.put_tokens(token_ids)
            self._requests.mark_token(request)
            is_past = tracker.decode_has_spoken and len(tracker.output_ids) >= request.cleared_len
            if is_past and (request.num_losses or request.num_excused):
                request.clear_losses()
                self._room.is_due = True
        if request.prefill_has_part:
            if tracker.has_first_token:
                request.prefill_is_computed()
            if tracker.decode_has_spoken and not tracker.lacks_prompt_logprobs:
                request.prefill_is_over()
                self._room.is_due = True
                self.moves.attempt_arrived(request)
        if tracker.state is RequestState.FINISHED and request.pair is not None:
            self._end_request(request, "finished")

    def _end_request(self, request: ActiveRequest, end: RequestEnd) -> None:
        pair = request.pair
        if pair is not None and end == "finished" and not request.tracker.embeds:
            pair.decode.rates.request_finished(request.tracker, pair.distance)
        # Workers notice only the finish themselves.
        request.release_pair(tell_workers=end != "finished")
        self._room.leave(request)
        self._room.is_due = True
        self.moves.attempt_ended(request)
        self._requests.mark_ended(request)
        request.tokens.put_end()
        tracker = request.tracker
        if tracker.attempt >= 0:
            self._policy.request_finished(pair, self._routing_request(tracker, tracker.attempt), end)

    def _routing_request(self, tracker: RequestTracker, attempt: int) -> RoutingRequest:
        spec = tracker.spec
        return RoutingRequest(
            request_id=tracker.request_id,
            attempt=attempt,
            prompt_ids=tracker.prompt_ids,
            output_ids=tuple(tracker.output_ids),
            max_new_tokens=tracker.max_output_tokens - len(tracker.output_ids),
            priority=spec.priority,
            session_id=spec.session_id,
            cache_namespace=spec.cache_namespace,
            prompt_identities=spec.prompt.identities,
            objectives=self._objectives,
            adapter=spec.adapter,
        )
