from dataclasses import dataclass, field

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.engine.token_sequence import TokenSequence
from tandem.lifecycle import FIRST_TOKEN, PREFILL_RECEIVED, PREFILL_STARTED
from tandem.messages import NO_HITS, Moment, Prefill, TierHits
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs
from tandem.worker.adapter_uses import NO_USE, AdapterUse


@dataclass(eq=False, slots=True)
class PrefillJob:
    """A request in prefill, from the locking of its pages to its handover.

    Attributes:
        started_ns, received_ns: times of the locking and of the arrival (0 if unknown).
        handle: the locked pages; None once handed over or ended.
        loaded: tokens of the cached prefix that the request's prefetch loaded.
        copies: reads of these pages that may outlast the job.
        pages_to_compute: identities of the full pages not launched, in order.
        prompt_logprobs: prompt log probabilities of the last computed chunk, if requested.
        first_token: the sampled token, once prefill is done.
        embedding: the prompt's embedding instead, once prefill is done.
        first_token_time_ns: end of the prefill; 0 before it.
        ship_started_ns: time of the first push; 0 before it.
        has_told_start: whether the router knows that the prefill has started.
        adapter: use of its adapter, held until the prompt is computed.
    """

    request: Prefill
    sequence: TokenSequence
    handle: PageHandle | None
    started_ns: int
    received_ns: int = 0
    loaded: TierHits = NO_HITS
    copies: list[Completion] = field(default_factory=list)
    pages_to_compute: list[int] = field(default_factory=list)
    prompt_logprobs: PackedLogprobs | None = None
    first_token: int | None = None
    embedding: bytes | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    first_token_time_ns: int = 0
    finish_reason: str = ""
    ship_started_ns: int = 0
    has_told_start: bool = False
    adapter: AdapterUse = NO_USE

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.request.attempt

    @property
    def is_new(self) -> bool:
        """True if no forward pass was launched for it."""
        return self.handle is not None and self.sequence.cached_len == self.handle.cached_len

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Known moments, for the router."""
        known = ((PREFILL_RECEIVED, self.received_ns), (PREFILL_STARTED, self.started_ns))
        moments = (*known, (FIRST_TOKEN, self.first_token_time_ns))
        return tuple([Moment(name, time_ns) for name, time_ns in moments if time_ns])

    def take_first(self, token_id: int, logprobs: TokenLogprobs | None, time_ns: int) -> None:
        self.first_token = token_id
        self.logprobs = () if logprobs is None else (logprobs,)
        self.first_token_time_ns = time_ns

    def take_embedding(self, embedding: bytes, time_ns: int) -> None:
        self.embedding = embedding
        self.first_token_time_ns = time_ns
