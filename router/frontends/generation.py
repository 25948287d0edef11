"""One output on its way to a client: its pieces and its end."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from tandem.lifecycle import ENDED, FIRST_TOKEN_SENT, RECEIVED, PhaseTiming, now_ns, phase_timings
from tandem.router.frontends.access import Access
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.tracker import RequestReport, RequestState, RequestTracker
from tandem.router.router import Router
from tandem.router.text.output_text import OutputText
from tandem.sampling_params import TokenLogprobs

# Tokens and log probabilities of one piece: detokenized and written as JSON in about a millisecond. A slow client's
# output waits for it, and may be long.
MAX_PIECE_TOKENS = 256
MAX_PIECE_LOGPROBS = 512


# Made for each token: a frozen one would take three times as long.
@dataclass(slots=True)
class Piece:
    """Output that goes to the client at once.

    Attributes:
        index: position of token_ids[0] in the output.
        text: new text, without incomplete characters and possible stop strings.
        finish_reason: "stop" or "length" on the last piece, which has no tokens.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str = ""


class Generation:
    """One output on its way to a client. Leaving the context early aborts the request.

    Attributes:
        timings: the request's phases, known after the last piece or the context.
    """

    def __init__(
        self,
        router: Router,
        access: Access,
        tracker: RequestTracker,
        output: OutputText,
    ) -> None:
        self.tracker = tracker
        self.timings: list[PhaseTiming] = []
        self._finish_reason = ""
        self._router = router
        self._access = access
        self._output = output
        self._num_resumed = self._index = len(tracker.output_ids)
        # Text of a resumed output that its client lacks goes with the next piece.
        self._owed_text = ""
        if (resumption := tracker.spec.resumption) is not None:
            if resumption.num_tokens is not None:
                self._index = resumption.num_tokens
            self._owed_text = output.replay(tracker.output_ids[: self._index], resumption.num_characters)
        self._owed_ids = tracker.output_ids[self._index :]
        num_top = tracker.sampling.num_logprobs
        self._max_tokens = MAX_PIECE_TOKENS if num_top is None else max(1, MAX_PIECE_LOGPROBS // (num_top + 1))
        self._request: ActiveRequest | None = None
        self._held = ExitStack()
        self._is_accounted = False
        self._is_over = False

    @property
    def num_output_tokens(self) -> int:
        return self._index

    @property
    def stop_string(self) -> str | None:
        return self._output.stop_string

    def __enter__(self) -> "Generation":
        """Raises as Router.submit_request."""
        with self._router.observers.refusals_counted(self.tracker.spec.client_request_id):
            self._held.enter_context(self._access.hold(self.tracker.spec.key))
            try:
                self._request = self._router.submit_request(self.tracker)
            except BaseException:
                self._held.close()
                raise
        self._router.observers.begun(self.tracker)
        self._tokens = self._request.tokens
        # A client that stops reading loses its request, not its connection.
        self._request.on_overdue = self._end
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._request is not None
        if not self._is_over:
            self._is_over = True
            self._router.close_request(self._request)
            self._account()

    def _account(self) -> None:
        if not self._is_accounted:
            self._is_accounted = True
            self.tracker.moments.setdefault(ENDED, now_ns())
            self._held.close()
            self.timings = phase_timings(self.tracker.moments)
            self._router.observers.ended(self._report())

    async def next_piece(self) -> Piece | None:
        """Returns None after the last piece. Raises as take_piece."""
        if self._finish_reason:
            return None
        if self._owed_ids or self._tokens.has_tokens:
            await asyncio.sleep(0)
        while (piece := self.take_piece()) is None:
            await self._tokens.news()
        return piece

    def call_at_news(self, call: Callable[[], None]) -> None:
        """Calls back once, as soon as `take_piece` may return a piece."""
        self._tokens.call_at_news(call)

    def take_piece(self) -> Piece | None:
        """Returns the new piece, if there is one. Do not call it after the last piece.

        Raises:
            UnavailableError: there were no workers, or none finished it within max_attempts.
            RequestTimeoutError: it took longer than request_timeout_s.
            InternalError: the routing policy failed.
        """
        output = self._output
        if output.stopped:
            return self._last_piece()
        if self._owed_ids:
            return self._owed_piece()
        token_ids = self._tokens.take_tokens(self._max_tokens)
        if not token_ids:
            return self._last_piece() if self._tokens.is_exhausted else None
        if FIRST_TOKEN_SENT not in self.tracker.moments:
            now = self.tracker.moments[FIRST_TOKEN_SENT] = now_ns()
            self._router.live.ttft.observe((now - self.tracker.moments[RECEIVED]) / 1e9)
        text, num_tokens = output.append_tokens(token_ids)
        if self._owed_text:
            text, self._owed_text = self._owed_text + text, ""
        start = self._index
        self._index = end = start + num_tokens
        logprobs = self.tracker.output_logprobs
        # Tokens behind a stop string are not part of the output.
        return Piece(start, token_ids[:num_tokens], text, logprobs[start:end] if logprobs else [])

    def _owed_piece(self) -> Piece:
        token_ids, self._owed_ids = self._owed_ids[: self._max_tokens], self._owed_ids[self._max_tokens :]
        text, num_tokens = self._output.append_tokens(token_ids)
        text, self._owed_text = self._owed_text + text, ""
        start, self._index = self._index, self._index + num_tokens
        return Piece(start, token_ids[:num_tokens], text, self.tracker.output_logprobs[start : self._index])

    def page_size(self) -> int:
        """Returns 0 if the prefill worker is gone."""
        worker = self._router.workers.get(self.tracker.prefill_worker_id)
        return worker.page_size if worker else 0

    def _last_piece(self) -> Piece:
        assert self._request is not None
        text, self._owed_text = self._owed_text + self._output.finish_text(), ""
        if self._output.stopped:
            self._router.stop_request(self._request)
        elif self.tracker.state is not RequestState.FINISHED:
            raise self.tracker.failure_class(self.tracker.failure)
        self._finish_reason = "stop" if self._output.stopped else self.tracker.finish_reason
        # A draining router waits for the context's end: this piece may still be unwritten.
        self._request.is_given = True
        self._account()
        return Piece(self._index, [], text, [], self._finish_reason)

    def _report(self) -> RequestReport:
        tracker = self.tracker
        if self._finish_reason:
            outcome = self._finish_reason
        elif tracker.state is RequestState.FAILED:
            outcome = tracker.failure_class.outcome
        else:
            # The client left.
            outcome = "abort"
        num_generated = max(0, self._index - self._num_resumed)
        return RequestReport(tracker, outcome, self._index, num_generated, self.timings)
