"""One sequence as the engine sees it: token ids, a page table, and lengths instead of flags."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.engine.grammars import Constraint
from tandem.sampling_params import SamplingParams

_GREEDY = SamplingParams(max_tokens=1)
# The table id of a sequence whose page table has no owner.
NO_TABLE = 0


class LogitBias:
    """What a request adds to its logits, as arrays.

    Attributes:
        token_ids: (n,) int64, in order, each once.
        values: (n,) float64, added to the logits of these tokens.
    """

    __slots__ = ("token_ids", "values")

    def __init__(self, pairs: Sequence[tuple[int, float]]) -> None:
        """Args: pairs: as SamplingParams.logit_bias; not empty."""
        token_ids, values = zip(*pairs, strict=True)
        self.token_ids = np.array(token_ids, dtype=np.int64)
        self.values = np.array(values, dtype=np.float64)


@dataclass(eq=False, slots=True)
class TokenSequence:
    """A request's tokens on one worker.

    Three lengths say where it is::

        0 ........ cached_len ........ device_len ........ len(token_ids)
          KV in the pool | the forward in hand | not yet sent to the device

    With overlap scheduling the newest token may have been sampled on the device without being known here yet: then
    `num_pending` is 1, and the sequence is that much longer than token_ids.

    Attributes:
        token_ids: prompt and output so far.
        prompt_len: how many of them are the client's prompt.
        page_ids: the page table; page i holds tokens i*page_size to (i+1)*page_size. Shared with the owner of the
            pages (a PageHandle), never copied, so that a page remapped there is remapped here.
        cached_len: tokens whose KV is in the pool.
        sampling: how the next token is chosen; greedy if not said.
        device_len: tokens that will have KV in the pool once the forward in hand is done.
        num_pending: tokens that forwards have sampled, or will have, and that are not in token_ids yet.
        bias: the logit bias of `sampling`, None if it has none.
        stop_token_ids: those of `sampling`.
        constraint: what keeps the output to the grammar of `sampling`, None if it has none.
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
    bias: "LogitBias | None" = field(default=None, init=False, repr=False)
    stop_token_ids: frozenset[int] = field(default=frozenset(), init=False, repr=False)
    _mirror: "array[int]" = field(default_factory=lambda: array("q"), init=False, repr=False)

    def __post_init__(self) -> None:
        self.device_len = self.cached_len
        # Both are made once: every step asks for them, and there may be hundreds.
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        if self.sampling.logit_bias:
            self.bias = LogitBias(self.sampling.logit_bias)

    def known_ids(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """A copy of token_ids. Only those that came since the last call are looked at one by one."""
        self._mirror.extend(self.token_ids[len(self._mirror) :])
        return np.array(self._mirror, dtype=np.int64)

    @property
    def length(self) -> int:
        """All tokens, those not known here included."""
        return len(self.token_ids) + self.num_pending

    @property
    def must_go_on(self) -> bool:
        """Whether the next token may not be one that ends the output, because that has too few tokens."""
        # Prompts are not counted for the many that ask for nothing.
        min_tokens = self.sampling.min_tokens
        return min_tokens > 0 and self.length - self.prompt_len < min_tokens and bool(self.stop_token_ids)

    @property
    def needs_argmax_only(self) -> bool:
        """Whether the next token is the most likely one, and nothing else is asked about it."""
        return self.sampling.needs_argmax_only and not self.must_go_on

    @property
    def extend_len(self) -> int:
        """Tokens that the next forward must compute."""
        return self.device_len - self.cached_len

    @property
    def remaining_len(self) -> int:
        """Tokens that no forward has been asked to compute yet."""
        return self.length - self.device_len

    @property
    def needs_logits(self) -> bool:
        """Whether the forward in hand reaches the last known token, so that the next one can be sampled."""
        return self.device_len == self.length

    def extend(self, num_tokens: int) -> None:
        """Asks the next forward for `num_tokens` more."""
        assert self.device_len == self.cached_len and 0 < num_tokens <= self.remaining_len
        self.device_len += num_tokens

    def complete_extend(self) -> None:
        """The forward in hand is done."""
        self.cached_len = self.device_len
