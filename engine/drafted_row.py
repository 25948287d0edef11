"""Rows of logits behind drafts, as the sampler sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tandem.engine.grammars import Constraint
from tandem.engine.token_sequence import LogitBias, TokenSequence
from tandem.sampling_params import SamplingParams


class SampledRow(Protocol):
    """Attributes of TokenSequence on which the next token depends, besides the logits."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def prompt_len(self) -> int: ...

    @property
    def num_pending(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def constraint(self) -> Constraint | None: ...

    @property
    def bias(self) -> LogitBias | None: ...

    @property
    def allowed(self) -> "np.ndarray[Any, np.dtype[np.int32]] | None": ...

    @property
    def stop_token_ids(self) -> frozenset[int]: ...

    @property
    def must_go_on(self) -> bool: ...

    @property
    def needs_argmax_only(self) -> bool: ...

    def known_ids(self) -> "np.ndarray[Any, np.dtype[np.int64]]": ...


@dataclass(slots=True)
class DraftedRow:
    """A sequence with its first drafts taken for its own tokens.

    The token that the sampler draws here is the sequence's next one exactly if it drew these drafts before.
    """

    sequence: TokenSequence
    num_drafts: int

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.sampling

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids, *self._drafts]

    @property
    def prompt_len(self) -> int:
        return self.sequence.prompt_len

    @property
    def num_pending(self) -> int:
        return 0

    @property
    def length(self) -> int:
        return self.sequence.length + self.num_drafts

    @property
    def constraint(self) -> None:
        """The request's matcher does not follow drafts: `allowed` holds the mask."""

    @property
    def bias(self) -> LogitBias | None:
        return self.sequence.bias

    @property
    def allowed(self) -> "np.ndarray[Any, np.dtype[np.int32]] | None":
        if self.sequence.constraint is not None:
            return self.sequence.draft_masks[self.num_drafts - 1]
        return self.sequence.allowed

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self.sequence.stop_token_ids

    @property
    def must_go_on(self) -> bool:
        return self.sequence.must_go_on_at(self.length)

    @property
    def needs_argmax_only(self) -> bool:
        return self.sampling.needs_argmax_only and not self.must_go_on

    def known_ids(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        return np.concatenate((self.sequence.known_ids(), np.array(self._drafts, np.int64)))

    @property
    def _drafts(self) -> Sequence[int]:
        return self.sequence.draft_ids[: self.num_drafts]
