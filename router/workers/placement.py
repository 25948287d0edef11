"""Placement of a request: prefill and decode at one worker or at two."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Placement = Literal["aggregated", "disaggregated"]

AGGREGATED: Placement = "aggregated"
DISAGGREGATED: Placement = "disaggregated"
# The policy decides.
AUTO = "auto"
PLACEMENTS = (AUTO, *get_args(Placement))


class EstimateOfPair(Protocol):
    @property
    def reason(self) -> str: ...

    @property
    def ttft_s(self) -> float: ...

    @property
    def itl_s(self) -> float: ...


class ChosenPair(Protocol):
    @property
    def placement(self) -> Placement: ...

    @property
    def estimate(self) -> EstimateOfPair | None: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """
    Attributes:
        reason: the policy's reason; "": none given.
        ttft_ms, itl_ms: the policy's estimates, from the choice to the first token and between tokens; 0: none.
    """

    placement: Placement
    reason: str = ""
    ttft_ms: float = 0.0
    itl_ms: float = 0.0

    @classmethod
    def of(cls, pair: ChosenPair) -> "Placed":
        estimate = pair.estimate
        if estimate is None:
            return cls(pair.placement)
        return cls(pair.placement, estimate.reason, 1e3 * estimate.ttft_s, 1e3 * estimate.itl_s)
