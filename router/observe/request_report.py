"""The facts about one request that the router's observers are told."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.lifecycle import PhaseTiming
from tandem.router.requests.tracker import RequestTracker


class RequestReport(NamedTuple):
    """All facts about a request, at its end. An observer keeps only small parts: the tracker holds prompt and output.

    Attributes:
        outcome: label of the request in the metrics, or "in hand".
        num_output_tokens: tokens of the output that the client has, including the beginning of a resumed one.
        num_generated_tokens: tokens among them that this router passed on.
        timings: phases up to the end.
    """

    tracker: RequestTracker
    outcome: str
    num_output_tokens: int
    num_generated_tokens: int
    timings: Sequence[PhaseTiming]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tracker.prompt_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first prefill found cached."""
        return self.tracker.prompt_cached_len or 0

    @property
    def num_attempts(self) -> int:
        return self.tracker.attempt + 1
