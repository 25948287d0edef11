from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.decode_worker.drafters.base import Drafter
from tandem.engine.grammar_drafts import DraftMatcher
from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.engine.token_sequence import TokenSequence
from tandem.lifecycle import now_ns
from tandem.messages import NO_HITS, Moment, TierHits
from tandem.priority import virtual_arrival_ns
from tandem.sampling_params import TokenLogprobs
from tandem.worker.adapter_uses import NO_USE, AdapterUse


@dataclass(eq=False, slots=True)
class JobDrafts:
    """What drafting keeps for one request.

    Attributes:
        drafter: None if the engine's model drafts.
        acceptance: by source, the chance of a draft behind an accepted one; empty without a policy.
        source: of the last proposal.
        proposed, proposed_at: the last proposal, computed or not, and the number of tokens before it.
        matcher: None without a grammar, or before the first draft.
    """

    drafter: Drafter | None = None
    acceptance: dict[str, float] = field(default_factory=dict)
    source: str = ""
    proposed: Sequence[int] = ()
    proposed_at: int = 0
    matcher: DraftMatcher | None = None


@dataclass(eq=False, slots=True)
class DecodeJob:
    """One request whose prompt's KV is in this worker's pool.

    Attributes:
        num_prior_outputs: output tokens of earlier attempts, part of the sequence.
        unsent: output tokens not sent to the router.
        cached_len, prefill_cached_len: prompt tokens cached before the request, here and at the prefill worker.
        prefill_loaded: those at the prefill worker that a prefetch loaded.
        moments: moments not sent to the router.
        has_ended: tokens of steps in flight are dropped.
        is_moving: its pages go ahead to another worker. It gets no drafts, so that it does not outgrow them.
        is_leaving: it gets no further step, because it moves once its tokens are known.
        client: takes turns with other clients at the compilers of grammars.
        cache_namespace: clients of other namespaces must learn nothing of its tokens.
        drafts: None before the first draft.
        num_drafted, num_accepted: tokens drafted in this attempt, and those that the sampler chose too.
        adapter: use of its adapter, held from its first step to its end.
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
    prefill_loaded: TierHits = NO_HITS
    moments: list[Moment] = field(default_factory=list)
    has_ended: bool = False
    is_moving: bool = False
    is_leaving: bool = False
    client: str = ""
    cache_namespace: str = ""
    drafts: JobDrafts | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    adapter: AdapterUse = NO_USE

    @property
    def queue_key(self) -> tuple[int, str]:
        """Sort key, the same on every attempt."""
        return virtual_arrival_ns(self.arrival_ns, self.priority), self.request_id

    @property
    def num_outputs(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.prompt_len

    @property
    def is_new(self) -> bool:
        """True if no step has been launched for it."""
        return self.num_outputs + self.sequence.num_pending == self.num_prior_outputs + 1

    @property
    def needs_step(self) -> bool:
        """True if another token is to be computed here, by max_tokens, and grammar and adapter are ready."""
        if self.is_compiling or self.is_leaving or self.waits_for_adapter:
            return False
        return self.num_outputs + self.sequence.num_pending < self.sequence.sampling.max_tokens

    @property
    def is_compiling(self) -> bool:
        return self.sequence.constraint is not None and not self.sequence.constraint.is_ready

    @property
    def waits_for_adapter(self) -> bool:
        return self.adapter is not NO_USE and not self.adapter.is_held

    def finish_reason(self) -> str:
        """Returns "stop", "length" or ""."""
        sequence = self.sequence
        return sequence.sampling.finish_reason(sequence.token_ids[-1], self.num_outputs, sequence.stop_token_ids)

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Takes the token of a step without drafts."""
        self.sequence.num_pending -= 1
        self._append(token_id, logprobs)

    def take_drafted(self, sampled: Sequence[tuple[int, TokenLogprobs | None]]) -> int:
        """Takes a step's tokens up to the first that differs from its draft.

        Args:
            sampled: the tokens behind the last one and behind each draft. No draft ends the output.

        Returns:
            The number of accepted drafts.
        """
        sequence = self.sequence
        sequence.num_pending -= 1
        drafts = sequence.draft_ids
        num_accepted = 0
        for token_id, logprobs in sampled:
            self._append(token_id, logprobs)
            if num_accepted == len(drafts) or token_id != drafts[num_accepted]:
                break
            num_accepted += 1
        sequence.accept_drafts(num_accepted)
        self.num_drafted += len(drafts)
        self.num_accepted += num_accepted
        return num_accepted

    def _append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.sequence.token_ids.append(token_id)
        self.unsent.append(token_id)
        if logprobs is not None:
            self.unsent_logprobs.append(logprobs)

    def stamp(self, moment: str) -> None:
        self.moments.append(Moment(moment, now_ns()))

    def take_moments(self) -> tuple[Moment, ...]:
        moments, self.moments = self.moments, []
        return tuple(moments)
