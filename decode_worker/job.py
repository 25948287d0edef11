"""One request that a decode worker runs."""

from dataclasses import dataclass, field

from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.engine.token_sequence import TokenSequence
from tandem.lifecycle import now_ns
from tandem.messages import Moment
from tandem.priority import virtual_arrival_ns
from tandem.sampling_params import TokenLogprobs


@dataclass(eq=False, slots=True)
class DecodeJob:
    """One request whose prompt is in this worker's pool.

    Attributes:
        num_prior_outputs: output tokens of earlier attempts, part of the sequence.
        unsent: tokens of the output that the router has not been sent yet; with their log probabilities, if asked for.
        cached_len: prompt tokens that were here before the request.
        prefill_cached_len: those that were where the prompt was computed.
        moments: those that the router has not been told.
        has_ended: what steps under way still find for it is of no use.
    """

    request_id: str
    attempt: int
    arrival_ns: int
    priority: int
    sequence: TokenSequence
    handle: PageHandle
    num_prior_outputs: int
    unsent: list[int]
    unsent_logprobs: list[TokenLogprobs]
    cached_len: int
    num_pages_shipped: int
    prefill_cached_len: int
    moments: list[Moment] = field(default_factory=list)
    has_ended: bool = False

    @property
    def queue_key(self) -> tuple[int, str]:
        """Smaller goes first; the same on every attempt."""
        return virtual_arrival_ns(self.arrival_ns, self.priority), self.request_id

    @property
    def num_outputs(self) -> int:
        """Output tokens that are known."""
        return len(self.sequence.token_ids) - self.sequence.prompt_len

    @property
    def is_new(self) -> bool:
        """Whether no step has been launched for it."""
        return self.num_outputs + self.sequence.num_pending == self.num_prior_outputs + 1

    @property
    def needs_step(self) -> bool:
        """Whether there is more to come when the steps launched so far are done, and may be chosen; only a stop token
        can change the first."""
        if self.is_compiling:
            return False
        return self.num_outputs + self.sequence.num_pending < self.sequence.sampling.max_tokens

    @property
    def is_compiling(self) -> bool:
        """Whether its next token cannot be chosen because its grammar is not compiled yet."""
        return self.sequence.constraint is not None and not self.sequence.constraint.is_ready

    def finish_reason(self) -> str:
        """Returns "stop", "length" or "", by the tokens that are known."""
        sequence = self.sequence
        return sequence.sampling.finish_reason(sequence.token_ids[-1], self.num_outputs, sequence.stop_token_ids)

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """The token that was pending longest is known."""
        self.sequence.num_pending -= 1
        self.sequence.token_ids.append(token_id)
        self.unsent.append(token_id)
        if logprobs is not None:
            self.unsent_logprobs.append(logprobs)

    def stamp(self, moment: str) -> None:
        self.moments.append(Moment(moment, now_ns()))

    def take_moments(self) -> tuple[Moment, ...]:
        """Those that the router has not been told."""
        moments, self.moments = self.moments, []
        return tuple(moments)
