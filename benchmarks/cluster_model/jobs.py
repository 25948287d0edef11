"""A request as a modelled worker has it."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Job:
    """
    Attributes:
        identities: of the pages of prompt and output, as far as anybody has use for them.
        found_cached: prompt tokens that the prefill worker had when it began.
        num_pages_shipped: to the decode worker.
        computed: prompt tokens that the prefill worker has in its cache.
        launched: of these and of those that are being computed, all together.
        started_at: when the first forward with tokens of it was launched; -1: none was.
        first_token_at, adopted_at: moments, the second when its decode worker had its KV; -1: they are yet to come.
        first_step: at its decode worker, the number of the step of its second token.
        step_times: of its decode worker.
    """

    number: int
    num_prompt: int
    num_output: int
    identities: Sequence[int]
    continues_here: bool
    found_cached: int = 0
    num_pages_shipped: int = 0
    computed: int = 0
    launched: int = 0
    started_at: float = -1.0
    first_token_at: float = -1.0
    adopted_at: float = -1.0
    first_step: int = -1
    step_times: Sequence[float] = field(default=())

    def token_times(self) -> list[float]:
        """When each token came, once all are there."""
        first = self.first_step
        return [self.first_token_at, *self.step_times[first : first + self.num_output - 1]]
