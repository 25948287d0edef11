"""Handover times and output lengths, which only the router can measure. Workers report forward times themselves
(`WorkerStats.forward_times`)."""

import time
from collections.abc import Callable
from typing import Protocol

from tandem.lifecycle import COMMITTED, FIRST_TOKEN, LEASE_GRANTED
from tandem.linear_fit import LinearFit

# Initial (seconds per handover, seconds per page), within a host, within a rack, and beyond.
START_HANDOVERS = {
    "cuda": ((3e-3, 6e-6), (4e-3, 1e-4), (5e-3, 2e-4)),
    "cpu": ((10e-3, 1e-4), (11e-3, 2e-4), (12e-3, 3e-4)),
}
# Weight of each new output in the mean length.
NEWS = 1 / 16
# Minimum seconds between decays of the averages.
AGEING_S = 1.0


class FinishedRequest(Protocol):
    """An ended request, for example a RequestTracker."""

    @property
    def moments(self) -> dict[str, int]: ...

    @property
    def num_pages_shipped(self) -> int: ...

    @property
    def output_ids(self) -> list[int]: ...


class ClusterRates:
    """Rates common to all workers of a cluster.

    Attributes:
        mean_output_tokens: mean output length of finished requests.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._aged_at = clock()
        starts = START_HANDOVERS["cuda" if device.startswith("cuda") else "cpu"]
        self._handovers = [LinearFit(start) for start in starts]
        # Learning costs time for each request, and most policies never ask.
        self._is_asked = False
        self.mean_output_tokens = 128.0

    def handover_s(self, distance: int) -> tuple[float, float]:
        """Returns (seconds per handover, seconds per shipped page). Learning starts with the first call.

        Args:
            distance: distance between the workers (router/workers/distance.py). A farther handover never takes less
                than a nearer one, so a search by distance finds the cheapest worker of all.
        """
        self._is_asked = True
        now = self._clock()
        if now - self._aged_at >= AGEING_S:
            for handover in self._handovers:
                handover.pass_time(now - self._aged_at)
            self._aged_at = now
        nearer = [handover.factors for handover in self._handovers[: distance + 1]]
        fixed, page = (max(factors) for factors in zip(*nearer, strict=True))
        return fixed, page

    def request_finished(self, request: FinishedRequest, distance: int | None) -> None:
        """
        Args:
            distance: distance between the request's workers; None for a single worker.
        """
        self.mean_output_tokens += NEWS * (len(request.output_ids) - self.mean_output_tokens)
        if distance is None or not self._is_asked:
            return
        moments = request.moments
        if moments.keys() >= {FIRST_TOKEN, LEASE_GRANTED, COMMITTED}:
            # Waits for pages or for a place in the batch are not part of a handover: the costs of memory and batch have
            # them.
            began = max(moments[FIRST_TOKEN], moments[LEASE_GRANTED])
            self._handovers[distance].observe(
                (1.0, request.num_pages_shipped), max(0, moments[COMMITTED] - began) / 1e9
            )
