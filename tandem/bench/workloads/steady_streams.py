"""Long streams, and prompts that arrive beside them: what prefills cost those who are being decoded."""

from collections.abc import Sequence

from tandem.bench.workloads.base import Session, Turn, Workload
from tandem.bench.workloads.prompts import PromptMaker


class SteadyStreams(Workload):
    """Each stream begins at once and again when it ends; the run cuts them when the last arrival has its answer.

    Where all begin with their first token, their contexts grow until the first streams end, and steps with them. Where
    they are spread, each begins as if it had run for a while, so contexts are of all lengths from the beginning on:
    what then changes is what the arrivals do.
    """

    def __init__(
        self,
        make: PromptMaker,
        arriving: Sequence[Session],
        num_streams: int,
        num_input: int,
        num_output: int,
        *,
        are_spread: bool = False,
    ) -> None:
        """Args: num_input, num_output: tokens of each stream."""
        self._make = make
        self._arriving = arriving
        self._num_streams = num_streams
        self._num_input = num_input
        self._num_output = num_output
        self._are_spread = are_spread

    def sessions(self) -> list[Session]:
        streams = []
        for number in range(self._num_streams):
            prompt = self._make.part("user", self._num_input, f"stream/{number}")
            begins_with = self._midway(number) if self._are_spread else None
            turns = (Turn((prompt,), self._num_output),)
            streams.append(Session(number, turns, "streams", begins_with=begins_with))
        return streams + list(self._arriving)

    def _midway(self, number: int) -> Turn:
        """A stream whose prompt is as long as if it had a part of its output, which is as large as its number."""
        num_had = number * self._num_output // self._num_streams
        prompt = self._make.part("user", self._num_input + num_had, f"stream/{number}/midway")
        return Turn((prompt,), self._num_output - num_had)
