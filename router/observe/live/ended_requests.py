"""The last ended requests, without their contents."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tandem.lifecycle import ENDED, PhaseTiming
from tandem.router.errors import shortened
from tandem.router.requests.tracker import RequestReport

MAX_REQUESTS = 60


class EndedRequest(NamedTuple):
    """
    Attributes:
        number: consecutive number.
        ended_s: seconds since the epoch.
        key: the owner's key, "" without keys: decides who may see the request, and is never shown.
        error: reason of a failure, or "".
        num_cached_tokens: prompt tokens that prefill found cached.
        loaded_tokens: those among them that came from the page store (tandem.messages.TierHits.counts).
    """

    number: int
    ended_s: float
    key: str
    request_id: str
    client_request_id: str
    outcome: str
    error: str
    num_prompt_tokens: int
    num_cached_tokens: int
    loaded_tokens: Mapping[str, int]
    num_output_tokens: int
    num_attempts: int
    prefill_worker_id: str
    decode_worker_id: str
    timings: Sequence[PhaseTiming]


class EndedRequests:
    def __init__(self) -> None:
        self._requests: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)
        self.num_requests = 0

    def add(self, report: RequestReport) -> None:
        tracker = report.tracker
        self.num_requests += 1
        self._requests.append(
            EndedRequest(
                self.num_requests,
                tracker.moments[ENDED] / 1e9,
                tracker.spec.key,
                tracker.request_id,
                tracker.spec.client_request_id,
                report.outcome,
                # The message may quote the request.
                "" if report.outcome == "invalid" else shortened(tracker.failure),
                report.num_prompt_tokens,
                report.num_cached_tokens,
                report.loaded.counts(),
                report.num_output_tokens,
                report.num_attempts,
                tracker.prefill_worker_id,
                tracker.decode_worker_id,
                report.timings,
            )
        )

    def since(self, number: int) -> Iterator[EndedRequest]:
        """Returns the requests after `number`, oldest first."""
        return (request for request in self._requests if request.number > number)
