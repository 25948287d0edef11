"""The one place where a routing policy is called. It may be anybody's class, and must not take the router down."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from router.candidates import Candidates
from router.errors import InternalError
from router.policies.base import AttemptFailure, RequestEnd, RoutingPolicy, RoutingRequest
from router.worker import Pair, Worker

logger = logging.getLogger(__name__)

# This is for the client. What exactly went wrong is for the log: it is no business of strangers.
FAILURE_MESSAGE = "the routing policy failed to choose workers; the router's log says why"


class GuardedPolicy(RoutingPolicy):
    """Calls another policy, and turns whatever that raises into something the router can go on after."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self.wants_prefixes = bool(policy.wants_prefixes)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        """
        Raises:
            InternalError: the policy raised something, or chose what is not among the candidates.
        """
        try:
            pair = self._policy.choose(candidates, request)
        except Exception as error:
            logger.exception("the routing policy failed to choose for request %s", request.request_id)
            raise InternalError(FAILURE_MESSAGE) from error
        if pair not in candidates:
            logger.error(
                "the routing policy chose %r for request %s, which is none of the pairs that it was given",
                pair,
                request.request_id,
            )
            raise InternalError(FAILURE_MESSAGE)
        return pair

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        with _failure_logged("attempt_started"):
            self._policy.attempt_started(pair, request)

    def attempt_failed(self, pair: Pair, request: RoutingRequest, kind: AttemptFailure, reason: str) -> None:
        with _failure_logged("attempt_failed"):
            self._policy.attempt_failed(pair, request, kind, reason)

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        with _failure_logged("request_finished"):
            self._policy.request_finished(pair, request, end)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        with _failure_logged("worker_lost"):
            self._policy.worker_lost(worker, reason)

    def worker_joined(self, worker: Worker) -> None:
        with _failure_logged("worker_joined"):
            self._policy.worker_joined(worker)


@contextmanager
def _failure_logged(hook: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("the routing policy failed in %s", hook)
