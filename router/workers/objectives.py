"""Latency objectives of requests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objectives:
    """
    Attributes:
        ttft_s: seconds from request to first token.
        itl_s: seconds between two tokens, for 95 % of gaps.
    """

    ttft_s: float = 0.5
    itl_s: float = 0.025

    @classmethod
    def of_ms(cls, ttft_ms: float, itl_ms: float) -> "Objectives":
        return cls(ttft_ms / 1e3, itl_ms / 1e3)


DEFAULT_OBJECTIVES = Objectives()
