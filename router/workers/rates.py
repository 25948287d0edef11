"""What a router alone sees of how its cluster serves: how long handovers take, and how long outputs are. How long
forwards take the workers say themselves (`WorkerStats.forward_times`)."""

import time
from collections.abc import Callable
from typing import Protocol

from tandem.lifecycle import COMMITTED, FIRST_TOKEN, LEASE_GRANTED
from tandem.linear_fit import LinearFit

# Seconds of a handover and of each page that is shipped, before any has been seen: within a host, a rack, and further.
START_HANDOVERS = {
    "cuda": ((3e-3, 6e-6), (4e-3, 1e-4), (5e-3, 2e-4)),
    "cpu": ((10e-3, 1e-4), (11e-3, 2e-4), (12e-3, 3e-4)),
}
# Share of each new output in the mean of their lengths.
NEWS = 1 / 16
# What was seen is aged so often at most.
AGEING_S = 1.0


class FinishedRequest(Protocol):
    """What is known of a request that has ended; a RequestTracker is one."""

    @property
    def moments(self) -> dict[str, int]: ...

    @property
    def num_pages_shipped(self) -> int: ...

    @property
    def output_ids(self) -> list[int]: ...


class ClusterRates:
    """These count as the same for all workers of a cluster.

    Attributes:
        mean_output_tokens: of requests that were finished.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: device: of its workers."""
        self._clock = clock
        self._aged_at = clock()
        starts = START_HANDOVERS["cuda" if device.startswith("cuda") else "cpu"]
        self._handovers = [LinearFit(start) for start in starts]
        # Learning costs each request something, and most policies never ask.
        self._is_asked = False
        self.mean_output_tokens = 128.0

    def handover_s(self, distance: int) -> tuple[float, float]:
        """Seconds of a handover to another worker: of each, and of each page that is shipped. They are learned from
        what was seen since this was first asked.

        Args:
            distance: to that (router/workers/distance.py). What is further never takes less here, so that among the
            cheapest at
                each distance the cheapest of all is found.
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
        """Args: distance: between the worker that has computed the prompt and the one that has decoded; None: it is
        one."""
        self.mean_output_tokens += NEWS * (len(request.output_ids) - self.mean_output_tokens)
        if distance is None or not self._is_asked:
            return
        moments = request.moments
        if moments.keys() >= {FIRST_TOKEN, LEASE_GRANTED, COMMITTED}:
            # That the decode worker had no pages for it, or no room in its steps, is no part of handing over: those
            # waits are in the costs of its memory and of its batch.
            began = max(moments[FIRST_TOKEN], moments[LEASE_GRANTED])
            self._handovers[distance].observe(
                (1.0, request.num_pages_shipped), max(0, moments[COMMITTED] - began) / 1e9
            )
