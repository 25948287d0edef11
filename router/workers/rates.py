"""Handover times and output lengths, which only the router can measure."""

import time
from collections.abc import Callable
from typing import Protocol

from tandem.lifecycle import COMMITTED, FIRST_TOKEN, LEASE_GRANTED
from tandem.linear_fit import LinearFit

# Initial (seconds per handover, seconds per page), for each of DISTANCES.
START_HANDOVERS = {
    "cuda": ((3e-3, 6e-6), (4e-3, 1e-4), (5e-3, 2e-4)),
    "cpu": ((10e-3, 1e-4), (11e-3, 2e-4), (12e-3, 3e-4)),
}
# Weight of each new output in the mean length.
NEWS = 1 / 16
# Minimum seconds between decays of the averages.
AGEING_S = 1.0


class FinishedRequest(Protocol):
    @property
    def moments(self) -> dict[str, int]: ...

    @property
    def num_pages_shipped(self) -> int: ...

    @property
    def output_ids(self) -> list[int]: ...

    @property
    def num_drafted(self) -> int: ...

    @property
    def num_accepted(self) -> int: ...


class ClusterRates:
    """
    Attributes:
        mean_output_tokens, mean_output_steps: tokens of a mean output, and its decode steps, fewer with speculation.
        mean_drafts: drafted tokens of a request and step.
        num_finished, num_finished_tokens, num_finished_steps: of finished requests.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._aged_at = clock()
        starts = START_HANDOVERS["cuda" if device.startswith("cuda") else "cpu"]
        self._handovers = [LinearFit(start) for start in starts]
        # Learning costs time for each request, and most policies never ask.
        self._is_asked = False
        self.mean_output_tokens = self.mean_output_steps = 128.0
        self.mean_drafts = 0.0
        self.num_finished = self.num_finished_tokens = self.num_finished_steps = 0

    def handover_s(self, distance: int) -> tuple[float, float]:
        """Returns (seconds per handover, seconds per shipped page), which do not decrease with distance. Learning
        starts with the first call."""
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
        """Args: distance: None for a single worker."""
        self.num_finished += 1
        self.num_finished_tokens += len(request.output_ids)
        self.mean_output_tokens += NEWS * (len(request.output_ids) - self.mean_output_tokens)
        num_steps = max(1, len(request.output_ids) - request.num_accepted)
        self.num_finished_steps += num_steps
        self.mean_output_steps += NEWS * (num_steps - self.mean_output_steps)
        self.mean_drafts += NEWS * (request.num_drafted / num_steps - self.mean_drafts)
        if distance is None or not self._is_asked:
            return
        moments = request.moments
        if moments.keys() >= {FIRST_TOKEN, LEASE_GRANTED, COMMITTED}:
            # Waits for pages and for a place in the batch belong to other costs.
            began = max(moments[FIRST_TOKEN], moments[LEASE_GRANTED])
            self._handovers[distance].observe(
                (1.0, request.num_pages_shipped), max(0, moments[COMMITTED] - began) / 1e9
            )
