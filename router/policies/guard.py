"""The only caller of a routing policy, which may be a user's class and must not break the router."""

import dataclasses
import logging
import operator
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.router.errors import InternalError
from tandem.router.policies.base import AttemptFailure, RequestEnd, RoutingPolicy, RoutingRequest
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Estimate, Pair, Worker

logger = logging.getLogger(__name__)

FAILURE_MESSAGE = "the routing policy failed to choose workers; the router's log says why"
# Limits for reasons, because each becomes a metric label. Further reasons count as OTHER.
MAX_REASONS = 64
MAX_REASON_LEN = 64
OTHER = "other"
# Range of estimated seconds. Values below LEAST_S count as 0.
LEAST_S, MOST_S = 1e-6, 1e6
_values_of = operator.attrgetter(*(field.name for field in dataclasses.fields(Estimate)))


class GuardedPolicy(RoutingPolicy):
    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._reasons: set[str] = set()
        self.wants_prefixes = bool(policy.wants_prefixes)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        """Raises InternalError if the policy raised, or its pair is not a candidate."""
        try:
            pair = self._policy.choose(candidates, request)
            is_candidate = pair in candidates
        except Exception as error:
            logger.exception("the routing policy failed to choose for request %s", request.request_id)
            raise InternalError(FAILURE_MESSAGE) from error
        if not is_candidate:
            logger.error(
                "the routing policy chose %r for request %s, which is not one of the candidates",
                pair,
                request.request_id,
            )
            raise InternalError(FAILURE_MESSAGE)
        checked = self._checked(pair, request)
        # The hooks get the policy's own pair object if it is a plain Pair.
        return pair if type(pair) is Pair and pair.estimate is checked else Pair(pair.prefill, pair.decode, checked)

    def _checked(self, pair: Pair, request: RoutingRequest) -> Estimate | None:
        """Returns None for an invalid estimate: the request is served all the same."""
        try:
            estimate = pair.estimate
            if estimate is None:
                return None
            num_tokens = request.num_prompt_tokens + len(request.output_ids)
            num_to_store, num_elsewhere = estimate.num_to_store, estimate.num_elsewhere
            checked = Estimate(
                _count(estimate.num_to_compute, num_tokens),
                self._reason(estimate.reason),
                _seconds(estimate.ttft_s),
                _seconds(estimate.itl_s),
                None if num_to_store is None else _count(num_to_store, num_tokens),
                None if num_elsewhere is None else _count(num_elsewhere, num_tokens),
            )
            is_plain = type(estimate) is Estimate and _types_of(estimate) == _types_of(checked)
            return estimate if is_plain and estimate == checked else checked
        except Exception:
            logger.exception("the routing policy made a wrong estimate for request %s", request.request_id)
            return None

    def _reason(self, reason: object) -> str:
        if not isinstance(reason, str) or len(reason) > MAX_REASON_LEN:
            raise ValueError(f"reason {reason!r:.100} is not a string of at most {MAX_REASON_LEN} characters")
        if reason in self._reasons or not reason:
            return reason
        if len(self._reasons) == MAX_REASONS:
            return OTHER
        self._reasons.add(reason)
        return reason

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


def _types_of(estimate: Estimate) -> list[type]:
    return [type(value) for value in _values_of(estimate)]


def _count(value: int, at_most: int) -> int:
    count = operator.index(value)
    if not 0 <= count <= at_most:
        raise ValueError(f"{count} tokens are estimated for a request of {at_most} tokens")
    return count


def _seconds(value: float) -> float:
    seconds = float(value)
    if not 0.0 <= seconds <= MOST_S:
        raise ValueError(f"estimated time {seconds} is not between 0 and {MOST_S:g} seconds")
    return seconds if seconds >= LEAST_S else 0.0


@contextmanager
def _failure_logged(hook: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("the routing policy failed in %s", hook)
