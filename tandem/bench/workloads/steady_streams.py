"""Long streams, and prompts that arrive beside them."""

from collections.abc import Sequence

from tandem.bench.workloads.base import Session, Turn, Workload
from tandem.bench.workloads.prompts import PromptMaker


class SteadyStreams(Workload):
    """Streams start at once and restart when they end, until the last arrival has its answer.

    Spread streams start at all context lengths, so that steps do not lengthen with the contexts.
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
        """Return a stream whose prompt includes a share of its output, by its number."""
        num_had = number * self._num_output // self._num_streams
        prompt = self._make.part("user", self._num_input + num_had, f"stream/{number}/midway")
        return Turn((prompt,), self._num_output - num_had)
