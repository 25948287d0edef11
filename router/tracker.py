"""One request's state machine at the router: attempts, the order of its tokens, and its one end.

Pure bookkeeping: no sockets, no clock, no workers. The Router feeds it messages and acts on what it says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.messages import Admit, Finished, FirstToken, Moment, Prefill, TokenEvent
from tandem.sampling_params import SamplingParams


class RequestState(Enum):
    WAITING = auto()  # no attempt is under way
    RUNNING = auto()
    FINISHED = auto()  # every token has been passed on
    FAILED = auto()
    ABORTED = auto()  # the client is gone


FINAL_STATES = (RequestState.FINISHED, RequestState.FAILED, RequestState.ABORTED)


@dataclass(eq=False, slots=True)
class Summary:
    """What the last attempt cost, as its workers reported."""

    prefill_cached_len: int = 0
    decode_cached_len: int = 0
    num_pages_computed: int = 0
    num_pages_shipped: int = 0


@dataclass(eq=False)
class RequestTracker:
    """
    Attributes:
        request_id: minted by the router.
        output_ids: tokens passed on so far; each index exactly once, in order.
        attempt: number of the current attempt; messages of any other have no effect.
        moments: nanoseconds by moment, those of a later attempt over those of an earlier one.
        prompt_cached_len: prompt tokens that the first attempt's prefill found cached, for the client's usage.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    state: RequestState = RequestState.WAITING
    attempt: int = -1
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    failure: str = ""
    prompt_cached_len: int | None = None
    summary: Summary = field(default_factory=Summary)
    moments: dict[str, int] = field(default_factory=dict)
    # Tokens that overtook an earlier one, by index.
    _early: dict[int, int] = field(default_factory=dict)
    # How many output tokens the end of the attempt announced, and its reason.
    _announced_end: tuple[int, str] | None = None

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    def start_attempt(
        self, prefill_worker_id: str, decode_worker_id: str, admit_duration_s: float
    ) -> tuple[Admit, Prefill]:
        """Begins the next attempt, carrying on from the tokens passed on so far; returns what to send."""
        assert self.state is RequestState.WAITING
        self.state = RequestState.RUNNING
        self.attempt += 1
        self.prefill_worker_id = prefill_worker_id
        self.decode_worker_id = decode_worker_id
        self.summary = Summary()
        output_ids = tuple(self.output_ids)
        return (
            Admit(self.request_id, self.attempt, self.prompt_ids, output_ids, self.sampling, admit_duration_s),
            Prefill(
                self.request_id,
                self.attempt,
                self.prompt_ids,
                output_ids,
                self.sampling,
                decode_worker_id,
                self.priority,
            ),
        )

    def end_attempt(self) -> None:
        """Ends the attempt in one act: what was passed on is frozen, whatever its workers still say is ignored."""
        assert self.state is RequestState.RUNNING
        self.state = RequestState.WAITING
        self._early.clear()
        self._announced_end = None

    def fail(self, reason: str) -> None:
        if not self.is_final:
            self.state = RequestState.FAILED
            self.failure = reason

    def abort(self) -> None:
        if not self.is_final:
            self.state = RequestState.ABORTED

    def is_current(self, attempt: int) -> bool:
        return self.state is RequestState.RUNNING and attempt == self.attempt

    def on_first_token(self, message: FirstToken) -> list[int]:
        """Returns the tokens to pass on now."""
        if not self.is_current(message.attempt):
            return []
        self._stamp(message.moments)
        self.summary.prefill_cached_len = message.cached_len
        self.summary.num_pages_computed = message.num_pages_computed
        if self.prompt_cached_len is None:
            self.prompt_cached_len = min(message.cached_len, len(self.prompt_ids))
        if message.finish_reason:
            self._announced_end = (message.index + 1, message.finish_reason)
        return self._accept(message.index, (message.token_id,))

    def on_tokens(self, event: TokenEvent) -> list[int]:
        """Returns the tokens to pass on now."""
        if not self.is_current(event.attempt):
            return []
        return self._accept(event.index, event.token_ids)

    def on_finished(self, message: Finished) -> None:
        if not self.is_current(message.attempt):
            return
        self._stamp(message.moments)
        self.summary.decode_cached_len = message.cached_len
        self.summary.num_pages_shipped = message.num_pages_shipped
        self._announced_end = (message.num_output_tokens, message.finish_reason)
        self._finish_if_complete()

    def _accept(self, index: int, token_ids: Sequence[int]) -> list[int]:
        for i, token_id in enumerate(token_ids, index):
            if i >= len(self.output_ids):
                self._early.setdefault(i, token_id)
        passed_on: list[int] = []
        while len(self.output_ids) in self._early:
            passed_on.append(self._early.pop(len(self.output_ids)))
            self.output_ids.append(passed_on[-1])
        self._finish_if_complete()
        return passed_on

    def _finish_if_complete(self) -> None:
        if self._announced_end is not None and len(self.output_ids) >= self._announced_end[0]:
            self.state = RequestState.FINISHED
            self.finish_reason = self._announced_end[1]

    def _stamp(self, moments: Sequence[Moment]) -> None:
        self.moments.update((m.name, m.time_ns) for m in moments)
