"""What a recording (`tandem trace`) says of a request: its moments, from which the phases follow."""

from tandem.lifecycle import ENDED, RECEIVED, now_ns
from tandem.recording import REQUESTS, Recorder
from tandem.router.requests.tracker import RequestTracker


def placed_fields(tracker: RequestTracker) -> dict[str, str | float]:
    """How the last attempt was placed, as fields of the log's line about a request."""
    placed = tracker.placed
    if placed is None:
        return {}
    fields: dict[str, str | float] = {"placement": placed.placement}
    if placed.reason:
        fields["placement_reason"] = placed.reason
        fields["estimated_ttft_ms"] = round(placed.ttft_ms, 3)
        fields["estimated_itl_ms"] = round(placed.itl_ms, 3)
    return fields


def record_request(recorder: Recorder, tracker: RequestTracker, outcome: str, num_output_tokens: int) -> None:
    """Args: outcome: what it counts as in the metrics, or "in hand"."""
    if not recorder.is_on:
        return
    # One that is in hand is in its last phase until now.
    moments = {**tracker.moments}
    ended_ns = moments.setdefault(ENDED, now_ns())
    placed = tracker.placed
    why = f"{placed.placement}:{placed.reason}" if placed is not None and placed.reason else ""
    names = (outcome, tracker.prefill_worker_id, tracker.decode_worker_id, why, tracker.spec.client_request_id)
    recorder.add(
        REQUESTS,
        "request",
        moments[RECEIVED],
        (tracker.request_id,),
        end_ns=ended_ns,
        detail=" ".join(filter(None, names)),
        numbers={
            **moments,
            "num_prompt_tokens": len(tracker.prompt_ids),
            "num_cached_tokens": tracker.prompt_cached_len or 0,
            "num_output_tokens": num_output_tokens,
            "attempts": tracker.attempt + 1,
            "pages_shipped": tracker.num_pages_shipped,
        },
    )
