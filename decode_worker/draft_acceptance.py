"""Measured acceptance of drafts."""

from collections.abc import Sequence

# Acceptance before the first observation.
START = 0.5
# Weight of an observation in a request's mean, and in that of all requests.
WEIGHT, SHARED_WEIGHT = 1 / 8, 1 / 64


class AcceptanceMeans:
    """Moving means of the chance of a draft behind right ones, by source."""

    def __init__(self, start: float = START) -> None:
        """Args: start: before the first observation."""
        self._start = start
        self._usual: dict[str, float] = {}

    def usual(self, source: str) -> float:
        """Returns the mean of all requests, which a new one is expected to have."""
        return self._usual.get(source, self._start)

    def observe(
        self,
        source: str,
        acceptance: float,
        proposed: Sequence[int],
        sampled: Sequence[int],
        weight: float = WEIGHT,
    ) -> float:
        """Returns a request's acceptance after the tokens that followed its last proposal are known.

        Args:
            weight: of each token in the request's mean.
        """
        usual = self.usual(source)
        for draft, token in zip(proposed, sampled, strict=False):
            is_right = draft == token
            acceptance += weight * (is_right - acceptance)
            usual += SHARED_WEIGHT * (is_right - usual)
            if not is_right:
                break
        self._usual[source] = usual
        return acceptance
