"""Long streams, and prompts that arrive beside them: what prefills cost those who are being decoded."""

from collections.abc import Sequence

from bench.workloads.base import Session, Turn, Workload
from bench.workloads.prompts import PromptMaker


class SteadyStreams(Workload):
    """Each stream begins at once and again when it ends; the run cuts them when the last arrival has its answer."""

    def __init__(
        self, make: PromptMaker, arriving: Sequence[Session], num_streams: int, num_input: int, num_output: int
    ) -> None:
        """Args: num_input, num_output: tokens of each stream."""
        self._make = make
        self._arriving = arriving
        self._num_streams = num_streams
        self._num_input = num_input
        self._num_output = num_output

    def sessions(self) -> list[Session]:
        streams = []
        for number in range(self._num_streams):
            prompt = self._make.part("user", self._num_input, f"stream/{number}")
            streams.append(Session(number, (Turn((prompt,), self._num_output),), "streams"))
        return streams + list(self._arriving)
