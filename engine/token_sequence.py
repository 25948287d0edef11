from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.embedding import EmbeddingParams
from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.grammars import WORD_BITS, Constraint
from tandem.sampling_params import SamplingParams

_GREEDY = SamplingParams(max_tokens=1)
NO_TABLE = 0


class LogitBias:
    """
    Attributes:
        token_ids: (n,) int64, ascending, distinct.
        values: (n,) float64, added to these tokens' logits.
    """

    __slots__ = ("token_ids", "values")

    def __init__(self, pairs: Sequence[tuple[int, float]]) -> None:
        token_ids, values = zip(*pairs, strict=True)
        self.token_ids = np.array(token_ids, dtype=np.int64)
        self.values = np.array(values, dtype=np.float64)


def bits_of(token_ids: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Returns these tokens as bits, lowest first: (words,) int32, up to the largest."""
    flags = np.zeros(-(-(max(token_ids) + 1) // WORD_BITS) * WORD_BITS, dtype=np.bool_)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


@dataclass(eq=False, slots=True)
class TokenSequence:
    """A request's tokens on one worker.

    Three lengths give its state::

        0 ........ cached_len ........ device_len ........ len(token_ids)
          KV in the pool | current forward pass | not yet sent to the device

    With overlap scheduling the host may not know the newest token, sampled on the device. Then `num_pending` is 1, and
    the sequence is one longer than token_ids.

    With speculation a forward pass also computes drafts behind the last token. They are part of no length but
    device_len, and only until `complete_extend`. `accept_drafts` then says how many the sampler chose too.

    Attributes:
        token_ids: prompt and output so far.
        prompt_len: tokens of the client's prompt.
        page_ids: the page table; page i holds tokens i*page_size to (i+1)*page_size. Shared with the PageHandle, never
            copied: remapping a page there remaps it here.
        cached_len: tokens whose KV is in the pool.
        device_len: tokens with KV in the pool after the current forward pass.
        num_pending: sampled tokens, or tokens being sampled, that are not in token_ids yet.
        allowed: the tokens that may be chosen, as `bits_of`; None: all.
        embedding: set for a prompt that is embedded and has no output.
        draft_ids: tokens that may follow the last one, of the next or current forward pass.
        draft_masks: with a constraint, the tokens allowed behind each draft, as `bits_of`.
        adapter_slot: NO_ADAPTER: the base model computes it. Set before the first forward pass, of an adapter that is
            acquired until the last one.
    """

    token_ids: list[int]
    prompt_len: int
    page_ids: Sequence[int]
    cached_len: int = 0
    sampling: SamplingParams = _GREEDY
    device_len: int = field(default=0)
    num_pending: int = 0
    constraint: Constraint | None = None
    table_id: int = NO_TABLE
    embedding: EmbeddingParams | None = None
    draft_ids: Sequence[int] = field(default=(), init=False)
    draft_masks: Sequence["np.ndarray[Any, np.dtype[np.int32]]"] = field(default=(), init=False, repr=False)
    adapter_slot: int = NO_ADAPTER
    bias: "LogitBias | None" = field(default=None, init=False, repr=False)
    allowed: "np.ndarray[Any, np.dtype[np.int32]] | None" = field(default=None, init=False, repr=False)
    stop_token_ids: frozenset[int] = field(default=frozenset(), init=False, repr=False)
    _mirror: "array[int]" = field(default_factory=lambda: array("q"), init=False, repr=False)

    def __post_init__(self) -> None:
        self.device_len = self.cached_len
        # Every step reads both for hundreds of sequences.
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        if self.sampling.logit_bias:
            self.bias = LogitBias(self.sampling.logit_bias)
        if self.sampling.allowed_token_ids:
            # Built once: every step reads it.
            self.allowed = bits_of(self.sampling.allowed_token_ids)

    def known_ids(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Converts only tokens that are new since the last call."""
        self._mirror.extend(self.token_ids[len(self._mirror) :])
        return np.array(self._mirror, dtype=np.int64)

    @property
    def length(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def must_go_on(self) -> bool:
        return self.must_go_on_at(self.length)

    def must_go_on_at(self, length: int) -> bool:
        """Returns whether the token at this index must not end the output."""
        min_tokens = self.sampling.min_tokens
        return min_tokens > 0 and length - self.prompt_len < min_tokens and bool(self.stop_token_ids)

    @property
    def needs_argmax_only(self) -> bool:
        return self.sampling.needs_argmax_only and not self.must_go_on

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len

    @property
    def remaining_len(self) -> int:
        """Tokens, drafts included, that no forward pass has been asked to compute."""
        return self.length + len(self.draft_ids) - self.device_len

    @property
    def needs_logits(self) -> bool:
        """True if the current forward pass reaches the last token, and samples the next."""
        return self.device_len == self.length + len(self.draft_ids) and self.embedding is None

    @property
    def needs_embedding(self) -> bool:
        """True if the current forward pass reaches the last token of a prompt to embed."""
        return self.embedding is not None and self.device_len == self.length

    def extend(self, num_tokens: int) -> None:
        assert self.device_len == self.cached_len and 0 < num_tokens <= self.remaining_len
        self.device_len += num_tokens

    def complete_extend(self) -> None:
        self.device_len -= len(self.draft_ids)
        self.cached_len = self.device_len

    def accept_drafts(self, num_accepted: int) -> None:
        """Counts the first drafts' KV as the sequence's own and forgets all drafts."""
        self.cached_len += num_accepted
        self.device_len = self.cached_len
        self.draft_ids = self.draft_masks = ()
