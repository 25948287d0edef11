"""How soon clients are to have their tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objectives:
    """
    Attributes:
        ttft_s: from a request to its first token.
        itl_s: between two of its tokens, but for one gap in twenty.
    """

    ttft_s: float = 0.5
    itl_s: float = 0.025

    @classmethod
    def of_ms(cls, ttft_ms: float, itl_ms: float) -> "Objectives":
        """As options have them, in milliseconds."""
        return cls(ttft_ms / 1e3, itl_ms / 1e3)


DEFAULT_OBJECTIVES = Objectives()
