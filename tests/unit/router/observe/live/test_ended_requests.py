import json

import pytest

from tandem.lifecycle import ENDED, RECEIVED, phase_timings
from tandem.router.errors import InvalidRequestError, UnavailableError
from tandem.router.observe.live.ended_requests import MAX_REQUESTS, EndedRequests
from tandem.router.requests.tracker import RequestReport, RequestTracker
from tests.fakes.request_spec import request_spec

SECOND = 10**9


def tracker(request_id: str = "id", **fields: object) -> RequestTracker:
    moments = {RECEIVED: 5 * SECOND, ENDED: 7 * SECOND}
    return RequestTracker(request_id, request_spec(moments=moments), **fields)  # type: ignore[arg-type]


def add(ended: EndedRequests, which: RequestTracker, outcome: str = "stop") -> None:
    timings = phase_timings(which.moments)
    ended.add(RequestReport(which, outcome, 1, 1, timings))


def test_the_latest_are_kept() -> None:
    ended = EndedRequests()
    for number in range(MAX_REQUESTS + 2):
        add(ended, tracker(str(number)))
    assert [r.request_id for r in ended.since(MAX_REQUESTS)] == [str(MAX_REQUESTS), str(MAX_REQUESTS + 1)]
    assert next(ended.since(0)).request_id == "2"
    assert next(ended.since(0)).ended_s == 7


@pytest.mark.parametrize("fails_with", [InvalidRequestError, UnavailableError])
def test_what_is_wrong_with_a_request_is_not_told(fails_with: type[InvalidRequestError | UnavailableError]) -> None:
    ended, failed = EndedRequests(), tracker()
    failed.mark_failed("the grammar 'secret' is none", fails_with)
    add(ended, failed, fails_with.outcome)
    (request,) = ended.since(0)
    assert ("secret" in json.dumps(request)) == (fails_with is UnavailableError)
