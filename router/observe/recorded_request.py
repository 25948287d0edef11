"""What a recording (`tandem trace`) says of a request: its moments, from which the phases follow."""

from tandem.lifecycle import ENDED, RECEIVED, now_ns
from tandem.recording import REQUESTS, Recorder
from tandem.router.observe.request_report import RequestReport


def record_request(recorder: Recorder, report: RequestReport) -> None:
    """Adds a request to the recording, if there is one. A request in hand is in its last phase until now."""
    if not recorder.is_on:
        return
    tracker = report.tracker
    moments = {**tracker.moments}
    ended_ns = moments.setdefault(ENDED, now_ns())
    placed = tracker.placed
    why = f"{placed.placement}:{placed.reason}" if placed is not None and placed.reason else ""
    workers = tracker.prefill_worker_id, tracker.decode_worker_id
    recorder.add(
        REQUESTS,
        "request",
        moments[RECEIVED],
        (tracker.request_id,),
        end_ns=ended_ns,
        detail=" ".join(filter(None, (report.outcome, *workers, why, tracker.spec.client_request_id))),
        numbers={
            **moments,
            "num_prompt_tokens": report.num_prompt_tokens,
            "num_cached_tokens": report.num_cached_tokens,
            "num_output_tokens": report.num_output_tokens,
            "attempts": report.num_attempts,
            "pages_shipped": tracker.num_pages_shipped,
        },
    )
