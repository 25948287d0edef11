"""Attempts to serve the requests in hand: how one begins, what its workers say of it, and what follows its end."""

import logging
from collections.abc import Callable

from router.active_request import ActiveRequest
from router.config import RouterConfig
from router.errors import InternalError, RequestError, UnavailableError
from router.metrics import RouterMetrics
from router.policies.base import AttemptFailure, RequestEnd, RoutingRequest
from router.policies.guard import GuardedPolicy
from router.tracker import RequestState, RequestTracker
from router.worker_registry import WorkerRegistry
from tandem.lifecycle import ASSIGNED, now_ns
from tandem.messages import Failed, Finished, FirstToken, GaveBack, LeaseLost, PrefillDeferred, TokenEvent

logger = logging.getLogger(__name__)

# A worker says these about one attempt; the tokens of a step come for all requests at once.
AttemptMessage = FirstToken | Finished | Failed | GaveBack | LeaseLost | PrefillDeferred


class Attempts:
    """Has workers serve requests, each in one attempt at a time, and starts the next where one ends early."""

    def __init__(
        self,
        config: RouterConfig,
        policy: GuardedPolicy,
        registry: WorkerRegistry,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._policy = policy
        self._registry = registry
        self._metrics = metrics
        self._clock = clock

    def start_attempt(self, request: ActiveRequest) -> None:
        """Starts the next attempt, or fails the request if there is nobody to serve it."""
        tracker = request.tracker
        tracker.finish_if_whole()
        if tracker.state is RequestState.FINISHED:
            # It was resumed, and only the word that it had ended was missing.
            self._end_request(request, "finished")
            return
        pairs = self._registry.pairs()
        if not pairs:
            self.fail_request(request, self._registry.not_ready_reason())
            return
        if request.num_failures >= self._config.max_attempts:
            self.fail_request(request, f"given up after {self._config.max_attempts} failed attempts")
            return
        view = _routing_request(tracker, tracker.attempt + 1)
        try:
            pair = self._policy.choose(pairs, view)
        except InternalError as error:
            self.fail_request(request, str(error), InternalError)
            return
        admit, prefill = tracker.begin_attempt(
            pair.prefill.worker_id, pair.decode.worker_id, self._config.admit_duration_s
        )
        request.assign_pair(pair)
        tracker.moments[ASSIGNED] = now_ns()
        pair.decode.send([admit])
        pair.prefill.send([prefill])
        self._policy.attempt_started(pair, view)

    def on_tokens(self, request: ActiveRequest, event: TokenEvent) -> None:
        """A request's part of what the decode worker's step has computed."""
        self._pass_on(request, request.tracker.record_tokens(event))

    def on_message(self, request: ActiveRequest, message: AttemptMessage) -> None:
        """What a worker says about an attempt; of any but the current one it has no effect."""
        match message:
            case FirstToken():
                self._pass_on(request, request.tracker.record_first_token(message))
            case Finished():
                request.tracker.record_finished(message)
                self._pass_on(request, [])
            case Failed():
                self._retry(request, message.attempt, "prefill_failed", message.reason)
            case GaveBack():
                # This is no failure: the oldest request is never given back, so it ends.
                self._retry(request, message.attempt, "given_back", "the decode worker ran out of pages", failed=False)
            case LeaseLost():
                self._retry(request, message.attempt, "lease_lost", "the decode worker lost the request's pages")
            case PrefillDeferred():
                self._retry(request, message.attempt, "deferred", "the decode worker had no pages for it", failed=False)

    def retry_after_loss(self, request: ActiveRequest, reason: str) -> None:
        """The current attempt ends with one of its workers."""
        self._retry(request, request.tracker.attempt, "worker_lost", reason)

    def fail_request(
        self, request: ActiveRequest, reason: str, failure_class: type[RequestError] = UnavailableError
    ) -> None:
        """Ends a request that cannot be served; what its client has not read of it can still be read. Like stop_request
        and abort_request it has no effect on a request that has ended.

        Args:
            failure_class: what is raised for the client.
        """
        if request.tracker.mark_failed(reason, failure_class):
            self._end_request(request, "failed")

    def stop_request(self, request: ActiveRequest) -> None:
        """Ends a request whose output a stop string has ended."""
        if request.tracker.mark_stopped():
            self._end_request(request, "stopped")

    def abort_request(self, request: ActiveRequest) -> None:
        """Ends a request whose client has left."""
        if request.tracker.mark_aborted():
            self._end_request(request, "aborted")

    def _retry(
        self,
        request: ActiveRequest,
        attempt: int,
        kind: AttemptFailure,
        reason: str,
        *,
        failed: bool = True,
    ) -> None:
        """Ends an attempt and starts the next.

        Args:
            kind: what the restart counts as.
            failed: whether the attempt counts towards max_attempts.
        """
        tracker = request.tracker
        if not tracker.is_current(attempt):
            return
        logger.info("request %s attempt %d ended: %s", tracker.request_id, attempt, reason)
        pair = request.pair
        assert pair is not None
        request.release_pair(tell_workers=True)
        request.num_failures += failed
        tracker.end_attempt()
        self._policy.attempt_failed(pair, _routing_request(tracker, attempt), kind, reason)
        if tracker.state is RequestState.FINISHED:
            self._end_request(request, "finished")
        else:
            self._metrics.attempt_restarted(kind)
            self.start_attempt(request)

    def _pass_on(self, request: ActiveRequest, token_ids: list[int]) -> None:
        """Acts on what a message has changed: new tokens, a worker whose part is over, the end."""
        tracker = request.tracker
        if token_ids:
            now = self._clock()
            if request.last_token_at is not None:
                self._metrics.itl.observe(now - request.last_token_at)
            request.last_token_at = now
            request.tokens.put_tokens(token_ids)
        if request.prefill_has_part:
            if tracker.has_first_token:
                request.prefill_is_computed()
            if tracker.decode_has_spoken:
                request.prefill_is_over()
        if tracker.state is RequestState.FINISHED and request.pair is not None:
            self._end_request(request, "finished")

    def _end_request(self, request: ActiveRequest, end: RequestEnd) -> None:
        """The one place where nothing is left to serve of a request, whatever its end."""
        pair = request.pair
        # Only those who have said themselves that they have finished know it.
        request.release_pair(tell_workers=end != "finished")
        request.tokens.put_end()
        tracker = request.tracker
        if tracker.attempt >= 0:
            self._policy.request_finished(pair, _routing_request(tracker, tracker.attempt), end)


def _routing_request(tracker: RequestTracker, attempt: int) -> RoutingRequest:
    """How a request stands now, for the policy."""
    return RoutingRequest(
        request_id=tracker.request_id,
        attempt=attempt,
        prompt_ids=tracker.prompt_ids,
        output_ids=tuple(tracker.output_ids),
        max_new_tokens=tracker.sampling.max_tokens - len(tracker.output_ids),
        priority=tracker.priority,
        session_id=tracker.session_id,
        cache_namespace=tracker.cache_namespace,
    )
