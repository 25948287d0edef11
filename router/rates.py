"""What a router alone sees of how its cluster serves: how long handovers take, and how long outputs are. How long
forwards take the workers say themselves (`WorkerStats.forward_times`)."""

from typing import Protocol

from tandem.lifecycle import DECODE_STARTED, FIRST_TOKEN
from tandem.linear_fit import LinearFit

# Seconds of a handover and of each page that is shipped, before any has been seen.
START_HANDOVERS = {"cuda": (8e-3, 6e-6), "cpu": (15e-3, 1e-4)}
# Share of each new output in the mean of their lengths.
NEWS = 1 / 16


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

    def __init__(self, device: str) -> None:
        """Args: device: of its workers."""
        self._handover = LinearFit(START_HANDOVERS["cuda" if device.startswith("cuda") else "cpu"])
        self.mean_output_tokens = 128.0

    @property
    def handover_s(self) -> tuple[float, float]:
        """Seconds of a handover to another worker: of each, and of each page that is shipped."""
        fixed, page = self._handover.factors
        return fixed, page

    def request_finished(self, request: FinishedRequest, *, is_apart: bool) -> None:
        """Args: is_apart: whether one worker has computed the prompt and another one has decoded."""
        self.mean_output_tokens += NEWS * (len(request.output_ids) - self.mean_output_tokens)
        first, second = request.moments.get(FIRST_TOKEN), request.moments.get(DECODE_STARTED)
        if is_apart and first is not None and second is not None:
            self._handover.observe((1.0, request.num_pages_shipped), max(0, second - first) / 1e9)
