"""Announces each request's beginning, refusal and end."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tandem.lifecycle import ENDED, RECEIVED, now_ns
from tandem.recording import REQUESTS, Recorder
from tandem.router.errors import RequestError, UnauthenticatedError
from tandem.router.observe.live.record import LiveRecord
from tandem.router.observe.metrics import RouterMetrics
from tandem.router.observe.request_lines import RequestLines
from tandem.router.requests.tracker import RequestReport, RequestTracker

request_logger = logging.getLogger("tandem.router.requests")


class RequestObservers:
    """Metrics, live page, recording, log, and the optional lines and spans."""

    def __init__(
        self, metrics: RouterMetrics, live: LiveRecord, recorder: Recorder, lines: RequestLines | None
    ) -> None:
        self._metrics = metrics
        self._lines = lines
        self._on_ended: list[Callable[[RequestReport], None]] = [
            metrics.request_ended,
            live.ended.add,
            partial(record_request, recorder),
            log_request,
        ]
        if lines is not None:
            self.subscribe(lines.ended)

    def subscribe(self, on_ended: Callable[[RequestReport], None]) -> None:
        self._on_ended.append(on_ended)

    def begun(self, tracker: RequestTracker) -> None:
        if self._lines is not None:
            self._lines.begun(tracker)

    def ended(self, report: RequestReport) -> None:
        for tell in self._on_ended:
            tell(report)

    def refused(self, error: RequestError, client_request_id: str) -> None:
        """Announces a request refused before any work."""
        self._metrics.request_refused(error.outcome)
        # Strangers must not be able to fill the log or a terminal.
        is_stranger = isinstance(error, UnauthenticatedError)
        if self._lines is not None and not is_stranger:
            self._lines.refused(client_request_id, error.outcome, str(error))
        level = logging.DEBUG if is_stranger else logging.INFO
        _log(level, {"client_request_id": client_request_id, "outcome": error.outcome, "error": str(error)})

    @contextmanager
    def refusals_counted(self, client_request_id: str = "") -> Iterator[None]:
        """Counts and logs a RequestError raised within."""
        try:
            yield
        except RequestError as error:
            self.refused(error, client_request_id)
            raise


def log_request(report: RequestReport) -> None:
    if not request_logger.isEnabledFor(logging.INFO):
        return
    tracker = report.tracker
    line = {
        "request_id": tracker.request_id,
        "client_request_id": tracker.spec.client_request_id,
        "outcome": report.outcome,
        "error": tracker.failure,
        "adapter": tracker.spec.model.name if tracker.spec.adapter is not None else "",
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
        **report.loaded.counts(),
        "output_tokens": report.num_output_tokens,
        "attempts": report.num_attempts,
        "prefill_worker": tracker.prefill_worker_id,
        "decode_worker": tracker.decode_worker_id,
        **_placed_fields(tracker),
        "phases_ms": {t.name: round(t.duration_ms, 3) for t in report.timings if t.on_critical_path},
        "overlapping_ms": {t.name: round(t.duration_ms, 3) for t in report.timings if not t.on_critical_path},
        "clock_uncertainty_ms": round(tracker.clock_uncertainty_ns / 1e6, 3),
    }
    _log(logging.INFO, line)


def record_request(recorder: Recorder, report: RequestReport) -> None:
    """A request in hand is in its last phase until now."""
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
            **{f"num_{name}": count for name, count in report.loaded.counts().items()},
            "num_output_tokens": report.num_output_tokens,
            "attempts": report.num_attempts,
            "pages_shipped": tracker.num_pages_shipped,
            "num_drafted_tokens": tracker.num_drafted,
            "num_accepted_tokens": tracker.num_accepted,
        },
    )


def _log(level: int, fields: dict[str, object]) -> None:
    if request_logger.isEnabledFor(level):
        request_logger.log(level, json.dumps({name: value for name, value in fields.items() if value != ""}))


def _placed_fields(tracker: RequestTracker) -> dict[str, object]:
    placed = tracker.placed
    if placed is None:
        return {}
    fields: dict[str, object] = {"placement": placed.placement}
    if placed.reason:
        fields["placement_reason"] = placed.reason
        fields["estimated_ttft_ms"] = round(placed.ttft_ms, 3)
        fields["estimated_itl_ms"] = round(placed.itl_ms, 3)
    return fields
