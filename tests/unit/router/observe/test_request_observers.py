from tandem.lifecycle import (
    ASSIGNED,
    DECODE_STARTED,
    ENDED,
    FIRST_TOKEN,
    PREFILL_STARTED,
    RECEIVED,
    TOKENIZED,
    critical_path,
    now_ns,
)
from tandem.recording import Recorder
from tandem.router.observe.request_observers import record_request
from tandem.router.requests.tracker import RequestReport, RequestTracker
from tests.fakes.request_spec import request_spec

MS = 10**6


def test_one_that_is_in_hand_is_in_its_last_phase_until_the_recording_ends() -> None:
    received_ns = now_ns() - 500 * MS
    names = (RECEIVED, TOKENIZED, ASSIGNED, PREFILL_STARTED, FIRST_TOKEN, DECODE_STARTED)
    moments = {name: received_ns + place * MS for place, name in enumerate(names)}
    tracker = RequestTracker("life-1", request_spec((1, 2), moments=moments))
    recorder = Recorder()
    recorder.start()
    record_request(recorder, RequestReport(tracker, "in hand", 3, 3, ()))
    (kept,) = recorder.stop().take(2)
    assert (kept.name, kept.start_ns, kept.detail) == ("request", received_ns, "in hand")
    phases = critical_path(kept.numbers)
    assert phases[-1].name == "decode" and phases[-1].duration_ms >= 490
    assert round(sum(phase.duration_ms for phase in phases) * MS) == kept.end_ns - kept.start_ns
    assert ENDED not in tracker.moments
