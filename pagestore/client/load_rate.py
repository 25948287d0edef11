"""Times of loading, measured over real loads."""

import math

from tandem.pagestore.messages import DISK, HOST, PEER

# Weight of a new measurement in the moving means.
WEIGHT = 1 / 8
# Age in seconds at which measurements no longer forbid a load: it measures anew.
STALE_S = 10.0


class _Mean:
    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        self.value = value if self.value is None else self.value + WEIGHT * (value - self.value)


class LoadRate:
    """Times of copies from the region, and of the store's answers.

    Before the first measurement, and STALE_S after the last, a load is taken to need no time, and is probed with a few
    pages.
    """

    def __init__(self) -> None:
        self._answer = _Mean()
        self._copy = _Mean()
        # Time to bring a page from a slow tier into the region, by tier: in a Find's first arrival, which includes the
        # tier's latency, and in later ones.
        self._first = {DISK: _Mean(), PEER: _Mean()}
        self._coming = {DISK: _Mean(), PEER: _Mean()}
        self._came_at = {DISK: -math.inf, PEER: -math.inf}
        self._answered_at = self._copied_at = -math.inf

    def is_known(self, now: float) -> bool:
        """Returns whether copies were measured lately."""
        return now - self._copied_at < STALE_S

    def answered(self, seconds: float, now: float) -> None:
        """Takes the time from a Find to its first answer, or to the end of the wait for it."""
        self._answer.observe(seconds)
        self._answered_at = now

    def copied(self, num_pages: int, seconds: float, now: float) -> None:
        """Takes the time of a copy."""
        self._copy.observe(seconds / num_pages)
        self._copied_at = now

    def came(self, tier: int, num_pages: int, seconds: float, now: float, *, is_first: bool) -> None:
        """Takes the time of pages from a slow tier since the previous answer to their Find."""
        if is_first:
            self._first[tier].observe(seconds / num_pages)
        else:
            self._coming[tier].observe(seconds / num_pages)
            self._came_at[tier] = now

    def answer_s(self, now: float) -> float:
        """Returns the expected time of an answer, in seconds; 0 if it is not known."""
        return (self._answer.value or 0.0) if now - self._answered_at < STALE_S else 0.0

    def copy_s(self, num_pages: int, now: float) -> float:
        """Returns the expected time of copies, in seconds; 0 if it is not known."""
        return (self._copy.value or 0.0) * num_pages if self.is_known(now) else 0.0

    def coming_s(self, tier: int, num_pages: int, now: float) -> float:
        """Returns the expected time until more pages of a slow tier have come, in seconds; 0 if it is not known."""
        if tier == HOST or now - self._came_at[tier] >= STALE_S:
            return 0.0
        return (self._coming[tier].value or 0.0) * num_pages

    def page_s(self, tier: int) -> float | None:
        """Returns the time of one page of a tier, in seconds; None if it was never measured."""
        if self._copy.value is None or tier == HOST:
            return self._copy.value
        coming = self._coming[tier].value
        if coming is None:
            coming = self._first[tier].value
        return None if coming is None else max(self._copy.value, coming)
