"""Pages of a model and of the model that drafts for it. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Self

from tandem.engine.attention.layout import DTYPE_BYTES
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig

# Kernels are compiled for addresses that are multiples of 16.
ALIGNMENT = 16
# A step computes at most so many tokens of a sequence, and the states before them are not needed again.
MAX_STATES = 8


@dataclass(frozen=True, slots=True)
class DraftedLayout(PageLayout):
    """A page has three regions: the target's page, the drafter's page, and states of the page's last tokens.

    Pages, and the first two regions in them, begin at multiples of a token's row in both of these. So each of the two
    can be viewed as rows of one token, whatever else a page holds.

    Attributes:
        state_size: numbers of a token's state, which the drafter reads behind the next token; 0: none.
        dtype: of states, by torch's name.
    """

    target: PageLayout
    drafter: PageLayout
    state_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.target.page_size != self.drafter.page_size:
            raise ValueError(f"pages of {self.target.page_size} and {self.drafter.page_size} tokens cannot be joined")

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, dtype: str, quantized_to: str = "") -> Self:
        raise TypeError("a drafter's configuration is needed too: page_layout_with")

    @property
    def page_size(self) -> int:  # type: ignore[override]
        return self.target.page_size

    @property
    def row_bytes(self) -> int:
        return math.lcm(self.target.row_bytes, self.drafter.row_bytes, ALIGNMENT)

    @property
    def state_bytes(self) -> int:
        return self.state_size * DTYPE_BYTES[self.dtype]

    @property
    def num_states(self) -> int:
        """States in a page. That of a token lies at its offset in the page modulo this number."""
        return min(self.page_size, MAX_STATES)

    @property
    def drafter_offset(self) -> int:
        """Start of the drafter's region, in bytes."""
        return self._aligned(self.target.page_bytes)

    @property
    def states_offset(self) -> int:
        return self._aligned(self.drafter_offset + self.drafter.page_bytes)

    @property
    def page_bytes(self) -> int:
        return self._aligned(self.states_offset + self.num_states * self.state_bytes)

    @property
    def tag(self) -> str:
        states = f" states/{self.dtype}/{self.num_states}x{self.state_size}" if self.state_size else ""
        return f"{self.target.tag} drafts/{self.drafter.tag}{states}"

    def shard(self, rank: int, degree: int) -> Self:
        if degree > 1:
            raise ValueError("pages with a drafter's layers are for workers of one rank")
        return self

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self.row_bytes) * self.row_bytes
