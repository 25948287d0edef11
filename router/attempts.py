"""Attempts to serve the requests in hand: how one begins, what its workers say of it, and what follows its end."""

import logging
from collections.abc import Callable

from router.active_request import RequestStream
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.policies.base import Prompt, RoutingPolicy
from router.tracker import RequestState
from router.worker_registry import WorkerRegistry
from tandem.lifecycle import ASSIGNED, now_ns
from tandem.messages import Failed, Finished, FirstToken, GaveBack, LeaseLost, PrefillDeferred, TokenEvent

logger = logging.getLogger(__name__)

# What a worker says about one attempt, but for the tokens of a step, which come for all requests at once.
AttemptMessage = FirstToken | Finished | Failed | GaveBack | LeaseLost | PrefillDeferred


class Attempts:
    """Has workers serve requests, each in one attempt at a time, and starts the next where one ends early."""

    def __init__(
        self,
        config: RouterConfig,
        policy: RoutingPolicy,
        registry: WorkerRegistry,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._policy = policy
        self._registry = registry
        self._metrics = metrics
        self._clock = clock

    def start(self, stream: RequestStream) -> None:
        """Starts the next attempt, or fails the request if there is nobody to serve it."""
        tracker = stream.tracker
        pairs = self._registry.pairs()
        if not pairs:
            self.fail(stream, self._registry.not_ready_reason())
            return
        if stream.num_failures >= self._config.max_attempts:
            self.fail(stream, f"given up after {self._config.max_attempts} failed attempts")
            return
        pair = self._policy.choose(pairs, _sequence(stream))
        admit, prefill = tracker.start_attempt(
            pair.prefill.worker_id, pair.decode.worker_id, self._config.admit_duration_s
        )
        stream.assign(pair)
        tracker.moments[ASSIGNED] = now_ns()
        pair.decode.send([admit])
        pair.prefill.send([prefill])

    def on_tokens(self, stream: RequestStream, event: TokenEvent) -> None:
        """A request's part of what the decode worker's step has computed."""
        self._pass_on(stream, stream.tracker.on_tokens(event))

    def on_message(self, stream: RequestStream, message: AttemptMessage) -> None:
        """What a worker says about an attempt; of any but the current one it has no effect."""
        match message:
            case FirstToken():
                self._pass_on(stream, stream.tracker.on_first_token(message))
            case Finished():
                stream.tracker.on_finished(message)
                self._pass_on(stream, [])
            case Failed():
                self._retry(stream, message.attempt, "prefill_failed", message.reason, retryable=message.retryable)
            case GaveBack():
                # No failure: the oldest request is never given back, so this ends.
                self._retry(stream, message.attempt, "given_back", "the decode worker ran out of pages", failed=False)
            case LeaseLost():
                self._retry(stream, message.attempt, "lease_lost", "the decode worker lost the request's pages")
            case PrefillDeferred():
                self._retry(stream, message.attempt, "deferred", "the decode worker had no room", failed=False)

    def retry_after_loss(self, stream: RequestStream, reason: str) -> None:
        """The current attempt ends with one of its workers."""
        self._retry(stream, stream.tracker.attempt, "worker_lost", reason)

    def fail(self, stream: RequestStream, reason: str) -> None:
        """Ends a request that has no attempt any more; what its client has not read of it can still be read."""
        stream.tracker.fail(reason)
        stream.tokens.end()

    def _retry(
        self,
        stream: RequestStream,
        attempt: int,
        kind: str,
        reason: str,
        *,
        retryable: bool = True,
        failed: bool = True,
    ) -> None:
        """Ends an attempt and starts the next.

        Args:
            kind: what the restart counts as.
            retryable: whether there is to be a next one.
            failed: whether the attempt counts towards max_attempts.
        """
        tracker = stream.tracker
        if not tracker.is_current(attempt):
            return
        logger.info("request %s attempt %d ended: %s", tracker.request_id, attempt, reason)
        stream.end_attempt(tell_workers=True)
        stream.num_failures += failed
        tracker.end_attempt()
        if tracker.state is RequestState.FINISHED:
            stream.tokens.end()
        elif retryable:
            self._metrics.attempt_restarted(kind)
            self.start(stream)
        else:
            self.fail(stream, reason)

    def _pass_on(self, stream: RequestStream, token_ids: list[int]) -> None:
        """Acts on what a message has changed: new tokens, a worker whose part is over, the end."""
        tracker = stream.tracker
        if token_ids:
            now = self._clock()
            if stream.last_token_at is not None:
                self._metrics.itl.observe(now - stream.last_token_at)
            stream.last_token_at = now
            stream.tokens.put(token_ids)
        if stream.prefill_has_part:
            if tracker.has_first_token:
                stream.prefill_is_computed()
            if tracker.decode_has_spoken:
                stream.prefill_is_over()
        if tracker.state is RequestState.FINISHED and stream.pair is not None:
            self._policy.finished(stream.pair, _sequence(stream))
            stream.end_attempt(tell_workers=False)
            stream.tokens.end()


def _sequence(stream: RequestStream) -> Prompt:
    """All tokens of a request so far."""
    tracker = stream.tracker
    return Prompt([*tracker.prompt_ids, *tracker.output_ids], tracker.cache_namespace)
