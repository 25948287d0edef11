"""One request at prefill."""

from dataclasses import dataclass, field

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.engine.token_sequence import TokenSequence
from tandem.lifecycle import FIRST_TOKEN, PREFILL_RECEIVED, PREFILL_STARTED
from tandem.messages import Moment, Prefill
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs


@dataclass(eq=False, slots=True)
class PrefillJob:
    """One request at prefill, from the moment its pages are locked until it is handed over.

    Attributes:
        started_ns: when its pages were locked.
        received_ns: when the request came to this worker; 0: nobody has noted that.
        handle: the locked pages; None once a handover has taken them over, or the job has ended.
        copies: reads of these pages that may still run when the job ends.
        pages_to_compute: identities of the full pages that no forward has been launched for yet, in order.
        prompt_logprobs: of the last chunk that is computed, if asked for.
        first_token: sampled, once prefill is done, at `first_token_time_ns`; with its `finish_reason`, and its
            `logprobs` if asked for.
        ship_started_ns: when its first pages were pushed to the decode worker; 0: none have been.
        has_told_start: whether the router knows that its prefill has started.
    """

    request: Prefill
    sequence: TokenSequence
    handle: PageHandle | None
    started_ns: int
    received_ns: int = 0
    copies: list[Completion] = field(default_factory=list)
    pages_to_compute: list[int] = field(default_factory=list)
    prompt_logprobs: PackedLogprobs | None = None
    first_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    first_token_time_ns: int = 0
    finish_reason: str = ""
    ship_started_ns: int = 0
    has_told_start: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.request.attempt

    @property
    def is_new(self) -> bool:
        """Whether no forward has been launched for it yet."""
        return self.handle is not None and self.sequence.cached_len == self.handle.cached_len

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Those that the router is told by this worker, as far as they are known."""
        known = ((PREFILL_RECEIVED, self.received_ns), (PREFILL_STARTED, self.started_ns))
        moments = (*known, (FIRST_TOKEN, self.first_token_time_ns))
        return tuple([Moment(name, time_ns) for name, time_ns in moments if time_ns])

    def take_first(self, token_id: int, logprobs: TokenLogprobs | None, time_ns: int) -> None:
        """Prefill is done."""
        self.first_token = token_id
        self.logprobs = () if logprobs is None else (logprobs,)
        self.first_token_time_ns = time_ns
