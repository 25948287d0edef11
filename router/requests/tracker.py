"""One request's state machine, without sockets, clock or workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from tandem.lifecycle import (
    ASSIGNED,
    DECODE_MOMENTS,
    FIRST_ASSIGNED,
    FIRST_TOKEN,
    LAST_TOKEN,
    PREFILL_MOMENTS,
    RECEIVED,
    ROUTER_ATTEMPT_MOMENTS,
    PhaseTiming,
)
from tandem.messages import (
    NO_HITS,
    Admit,
    Embedded,
    Finished,
    FirstToken,
    Prefill,
    PromptScored,
    TierHits,
    TokenEvent,
)
from tandem.router.errors import RequestError, UnavailableError
from tandem.router.requests.prompt_logprobs import PromptLogprobs
from tandem.router.requests.request_spec import RequestSpec
from tandem.router.workers.placement import Placed
from tandem.sampling_params import SamplingParams, TokenLogprobs


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()
    FAILED = auto()
    ABORTED = auto()


# The finish reason of a prompt that is only embedded.
EMBEDDED = "embedded"
FINAL_STATES = (RequestState.FINISHED, RequestState.FAILED, RequestState.ABORTED)


@dataclass(eq=False, slots=True)
class RequestTracker:
    """A Generation owns it, and the router changes it.

    Attributes:
        arrival_ns: age at the workers' queues; earlier than RECEIVED if a resumed request keeps its stream's age.
        attempt: current attempt; messages of any other have no effect.
        output_ids: tokens passed on so far; each index exactly once, in order.
        output_logprobs: log probabilities of output_ids; empty if not asked for.
        embedding: the result of a prompt that is only embedded: float32, little-endian.
        prompt_logprobs: complete before any token is passed on; None: not asked for.
        decode_has_spoken: True once the attempt's decode worker has sent tokens.
        prompt_cached_len: prompt tokens that the first prefill found cached.
        prompt_loaded: those among them that came from the page store.
        moments: nanoseconds by moment on the router's clock; only the last attempt's.
        clock_uncertainty_ns: largest possible error of the workers' moments.
    """

    request_id: str
    spec: RequestSpec
    # Copies, because `sampling` is read for every token.
    prompt_ids: tuple[int, ...] = field(init=False)
    sampling: SamplingParams = field(init=False)
    arrival_ns: int = field(init=False)
    state: RequestState = RequestState.WAITING
    attempt: int = -1
    placed: Placed | None = None
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    output_ids: list[int] = field(init=False)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes = b""
    finish_reason: str = ""
    failure: str = ""
    failure_class: type[RequestError] = UnavailableError
    has_first_token: bool = False
    decode_has_spoken: bool = False
    prompt_cached_len: int | None = None
    prompt_loaded: TierHits = NO_HITS
    prefill_cached_len: int = 0
    decode_cached_len: int = 0
    num_pages_computed: int = 0
    num_pages_shipped: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    moments: dict[str, int] = field(init=False)
    clock_uncertainty_ns: int = 0
    # Tokens that have overtaken an earlier one, by index.
    _early: dict[int, tuple[int, Sequence[TokenLogprobs]]] = field(default_factory=dict)
    # Number of output tokens at the end, and its reason.
    _announced_end: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        spec = self.spec
        self.prompt_ids, self.sampling = spec.prompt.token_ids, spec.sampling
        self.moments = dict(spec.prompt.moments)
        self.arrival_ns = self.moments.get(RECEIVED, 0)
        self.output_ids = list(spec.resumption.token_ids) if spec.resumption is not None else []
        if self.sampling.num_logprobs is not None:
            # The client has them.
            self.output_logprobs = [TokenLogprobs(0.0)] * len(self.output_ids)
        # A client that resumes has them.
        if self.sampling.num_prompt_logprobs is not None and not self.output_ids:
            self.prompt_logprobs = PromptLogprobs(len(self.prompt_ids))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True if prompt log probabilities hold back the tokens."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    @property
    def embeds(self) -> bool:
        """True if the prompt is only embedded, by a prefill worker alone."""
        return self.spec.embedding is not None

    @property
    def max_output_tokens(self) -> int:
        return 0 if self.embeds else self.sampling.max_tokens

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    def begin_attempt(
        self, prefill_worker_id: str, decode_worker_id: str, admit_duration_s: float, placed: Placed | None = None
    ) -> tuple[Admit | None, Prefill]:
        """Returns the messages to send.

        Args:
            decode_worker_id: "" if the prompt is only embedded; then there is no Admit.
        """
        assert self.state is RequestState.WAITING
        self.state = RequestState.RUNNING
        self.attempt += 1
        self.placed = placed
        self.prefill_worker_id = prefill_worker_id
        self.decode_worker_id = decode_worker_id
        self.prefill_cached_len = self.decode_cached_len = 0
        self.num_pages_computed = self.num_pages_shipped = 0
        self.num_drafted = self.num_accepted = 0
        self.has_first_token = self.decode_has_spoken = False
        output_ids = tuple(self.output_ids)
        without = self.sampling.without_prompt_logprobs()
        if self.lacks_prompt_logprobs:
            # A chunk's log probabilities are sent once, so the next attempt computes all of them.
            self.prompt_logprobs = PromptLogprobs(len(self.prompt_ids))
        spec = self.spec
        prefill = Prefill(
            self.request_id,
            self.attempt,
            self.prompt_ids,
            output_ids,
            self.sampling if self.lacks_prompt_logprobs else without,
            decode_worker_id,
            self.arrival_ns,
            spec.priority,
            spec.cache_namespace,
            spec.record_id,
            spec.resume_token,
            spec.embedding,
            spec.client,
            adapter=spec.adapter,
        )
        if self.embeds:
            return None, prefill
        admit = Admit(
            self.request_id,
            self.attempt,
            self.prompt_ids,
            output_ids,
            without,
            admit_duration_s,
            self.arrival_ns,
            spec.priority,
            spec.cache_namespace,
            spec.record_id,
            spec.resume_token,
            spec.client,
            prefill_worker_id,
            adapter=spec.adapter,
        )
        return admit, prefill

    def finish_if_whole(self) -> None:
        assert self.state is RequestState.WAITING
        if self.output_ids:
            self.finish_reason = self.sampling.finish_reason(self.output_ids[-1], len(self.output_ids))
            if self.finish_reason:
                self.state = RequestState.FINISHED

    def end_attempt(self) -> None:
        assert self.state is RequestState.RUNNING
        self.state = RequestState.WAITING
        self.finish_if_whole()
        self._early.clear()
        self._announced_end = None
        if not self.is_final:
            self._forget_moments()

    def mark_failed(self, reason: str, failure_class: type[RequestError]) -> bool:
        """Returns whether this ended the request; so do the other mark_ methods."""
        if self.is_final:
            return False
        self.state = RequestState.FAILED
        self.failure = reason
        self.failure_class = failure_class
        return True

    def mark_stopped(self) -> bool:
        if self.is_final:
            return False
        self.state = RequestState.FINISHED
        self.finish_reason = "stop"
        return True

    def mark_aborted(self) -> bool:
        if self.is_final:
            return False
        self.state = RequestState.ABORTED
        return True

    def is_current(self, attempt: int) -> bool:
        return self.state is RequestState.RUNNING and attempt == self.attempt

    def record_prompt_logprobs(self, message: PromptScored) -> list[int]:
        """Returns the tokens that these held back. Raises ValueError if they do not belong to this prompt."""
        if not self.is_current(message.attempt):
            return []
        if self.prompt_logprobs is None:
            raise ValueError(f"unrequested log probabilities of the prompt of {self.request_id}")
        self.prompt_logprobs.append(message.logprobs)
        passed_on = self._put_in_order(0, (), ())
        self._finish_if_complete()
        return passed_on

    def record_first_token(self, message: FirstToken) -> list[int]:
        if not self.is_current(message.attempt):
            return []
        if self.embeds:
            raise ValueError(f"a token of {self.request_id}, whose prompt is only embedded")
        if self.lacks_prompt_logprobs:
            raise ValueError(f"the first token of {self.request_id} before the log probabilities of its prompt")
        self.has_first_token = True
        self._take_prefill_hits(message.cached_len, message.loaded)
        self.num_pages_computed = message.num_pages_computed
        if message.finish_reason:
            self._announced_end = (message.index + 1, message.finish_reason)
            if FIRST_TOKEN in self.moments:
                self.moments[LAST_TOKEN] = self.moments[FIRST_TOKEN]
        return self._accept(message.index, (message.token_id,), message.logprobs)

    def record_embedding(self, message: Embedded) -> None:
        """Raises ValueError if none was requested."""
        if not self.is_current(message.attempt):
            return
        if not self.embeds:
            raise ValueError(f"an unrequested embedding of {self.request_id}")
        self.embedding = message.values
        self._take_prefill_hits(message.cached_len, message.loaded)
        self.num_pages_computed = message.num_pages_computed
        if FIRST_TOKEN in self.moments:
            self.moments[LAST_TOKEN] = self.moments[FIRST_TOKEN]
        self.state = RequestState.FINISHED
        self.finish_reason = EMBEDDED

    def record_tokens(self, event: TokenEvent) -> list[int]:
        """Returns the tokens to pass on now. Raises ValueError if log probabilities are missing."""
        if not self.is_current(event.attempt):
            return []
        self.decode_has_spoken = True
        return self._accept(event.index, event.token_ids, event.logprobs)

    def record_finished(self, message: Finished) -> None:
        if not self.is_current(message.attempt):
            return
        self.decode_cached_len = message.cached_len
        if not self.has_first_token:
            # The decode worker may report before the prefill worker.
            self._take_prefill_hits(message.prefill_cached_len, message.prefill_loaded)
        self.num_pages_shipped = message.num_pages_shipped
        self.num_drafted, self.num_accepted = message.num_drafted, message.num_accepted
        self._announced_end = (message.num_output_tokens, message.finish_reason)
        self._finish_if_complete()

    def _take_prefill_hits(self, cached_len: int, loaded: TierHits) -> None:
        self.prefill_cached_len = cached_len
        if self.prompt_cached_len is None:
            self.prompt_cached_len = min(cached_len, len(self.prompt_ids))
            self.prompt_loaded = loaded.in_prompt(cached_len, len(self.prompt_ids))

    def _accept(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[int]:
        if len(logprobs) != (0 if self.sampling.num_logprobs is None else len(token_ids)):
            raise ValueError(f"{len(logprobs)} log probabilities for {len(token_ids)} tokens of {self.request_id}")
        is_next = index == len(self.output_ids) and not self._early
        if is_next and (self.prompt_logprobs is None or self.prompt_logprobs.is_complete):
            # Nearly every token comes in order.
            passed_on = list(token_ids)
            self.output_ids += passed_on
            self.output_logprobs += logprobs
        else:
            passed_on = self._put_in_order(index, token_ids, logprobs)
        if self._announced_end is not None:
            self._finish_if_complete()
        return passed_on

    def _put_in_order(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[int]:
        for i, token_id in enumerate(token_ids):
            if index + i >= len(self.output_ids):
                self._early.setdefault(index + i, (token_id, logprobs[i : i + 1]))
        passed_on: list[int] = []
        while not self.lacks_prompt_logprobs and len(self.output_ids) in self._early:
            token_id, its_logprobs = self._early.pop(len(self.output_ids))
            passed_on.append(token_id)
            self.output_ids.append(token_id)
            self.output_logprobs.extend(its_logprobs)
        return passed_on

    def _finish_if_complete(self) -> None:
        if self._announced_end is not None and len(self.output_ids) >= self._announced_end[0]:
            self.state = RequestState.FINISHED
            self.finish_reason = self._announced_end[1]

    def _forget_moments(self) -> None:
        if ASSIGNED in self.moments:
            self.moments.setdefault(FIRST_ASSIGNED, self.moments[ASSIGNED])
        for name in (*ROUTER_ATTEMPT_MOMENTS, *PREFILL_MOMENTS, *DECODE_MOMENTS):
            self.moments.pop(name, None)
        self.clock_uncertainty_ns = 0


class RequestReport(NamedTuple):
    """An ended request. Observers must not keep it: the tracker holds prompt and output.

    Attributes:
        outcome: label of the request in the metrics, or "in hand".
        num_output_tokens: tokens that the client has, including the beginning of a resumed output.
        num_generated_tokens: tokens among them that this router passed on.
    """

    tracker: RequestTracker
    outcome: str
    num_output_tokens: int
    num_generated_tokens: int
    timings: Sequence[PhaseTiming]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tracker.prompt_ids)

    @property
    def num_cached_tokens(self) -> int:
        return self.tracker.prompt_cached_len or 0

    @property
    def loaded(self) -> TierHits:
        """Those among the cached tokens that came from the page store."""
        return self.tracker.prompt_loaded

    @property
    def num_attempts(self) -> int:
        return self.tracker.attempt + 1
