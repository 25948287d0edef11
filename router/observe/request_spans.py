"""Ended requests on their way to a collector of traces. While the collector is slow or away, requests are dropped and
counted."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.lifecycle import ENDED, RECEIVED, PhaseTiming
from tandem.messages import TierHits
from tandem.router.requests.client_ids import TraceContext
from tandem.router.requests.tracker import RequestReport

logger = logging.getLogger(__name__)

MAX_QUEUED = 2048
# Requests per export. Their spans take a few milliseconds to encode.
BATCH_SIZE = 32
# Interval between exports.
INTERVAL_S = 1.0
STOP_TIMEOUT_S = 2.0
MAX_ERROR_LEN = 1000
QUEUE_FULL, EXPORT_FAILED = "queue_full", "export_failed"
DROP_REASONS = (QUEUE_FULL, EXPORT_FAILED)


class TracedRequest(NamedTuple):
    """Facts for a request's spans, all small: many requests may be queued.

    Attributes:
        outcome: label of the request in the metrics.
        error: reason of a failure, or "".
        received_ns, ended_ns: times on the router's clock.
        timings: the phases between the two.
        loaded: cached tokens that came from the page store.
        embeds: its prompt is only embedded.
    """

    request_id: str
    client_request_id: str
    trace_context: TraceContext | None
    outcome: str
    error: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    frequency_penalty: float
    presence_penalty: float
    num_prompt_tokens: int
    num_cached_tokens: int
    loaded: TierHits
    num_output_tokens: int
    num_attempts: int
    prefill_worker_id: str
    decode_worker_id: str
    received_ns: int
    ended_ns: int
    timings: Sequence[PhaseTiming]
    embeds: bool = False

    @classmethod
    def of(cls, report: RequestReport) -> "TracedRequest":
        tracker = report.tracker
        sampling = tracker.sampling
        return cls(
            tracker.request_id,
            tracker.spec.client_request_id,
            tracker.spec.trace_context,
            report.outcome,
            tracker.failure[:MAX_ERROR_LEN],
            sampling.max_tokens,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            report.num_prompt_tokens,
            report.num_cached_tokens,
            report.loaded,
            report.num_output_tokens,
            report.num_attempts,
            tracker.prefill_worker_id,
            tracker.decode_worker_id,
            tracker.moments[RECEIVED],
            tracker.moments[ENDED],
            report.timings,
            tracker.embeds,
        )


class RequestSpans:
    def __init__(
        self,
        export: Callable[[Sequence[TracedRequest]], bool],
        on_dropped: Callable[[str, int], None],
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """
        Args:
            export: sends spans and returns whether it could; called on the thread, and may block.
            on_dropped: called with one of DROP_REASONS and the number of requests; each reason from one thread.
        """
        self._export = export
        self._on_dropped = on_dropped
        self._max_queued = max_queued
        # Appending and popping are atomic, so there is no lock.
        self._queue: deque[TracedRequest] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, report: RequestReport) -> None:
        """Called on the loop; never waits."""
        if len(self._queue) >= self._max_queued:
            self._on_dropped(QUEUE_FULL, 1)
        else:
            self._queue.append(TracedRequest.of(report))

    def close(self) -> None:
        """Sends the queued requests, for STOP_TIMEOUT_S at most."""
        self._closing.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        is_reachable = True
        while True:
            is_closing = self._closing.wait(INTERVAL_S)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._queue and not (is_closing and time.monotonic() > deadline):
                batch = [self._queue.popleft() for _ in range(min(BATCH_SIZE, len(self._queue)))]
                was_reachable, is_reachable = is_reachable, self._send(batch)
                if not is_reachable:
                    self._on_dropped(EXPORT_FAILED, len(batch))
                if is_reachable != was_reachable:
                    logger.warning("the collector of traces %s spans", "takes" if is_reachable else "does not take")
            if is_closing:
                return

    def _send(self, batch: Sequence[TracedRequest]) -> bool:
        try:
            return self._export(batch)
        except Exception:
            # Errors from the collector or the exporter must not kill the thread.
            logger.exception("spans could not be sent")
            return False
