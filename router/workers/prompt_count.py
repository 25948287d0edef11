"""Prompt work assigned by a router, for the role planner."""

from dataclasses import dataclass

from tandem.router.workers.worker import Estimate


@dataclass(slots=True)
class PromptCount:
    """Totals over all attempts.

    Attributes:
        tokens: prompt tokens not expected to be cached.
        attended: sum of the tokens that each of these attends to.
        elsewhere, elsewhere_attended: the same for tokens uncached at half of the workers or more.
        whole: all prompt tokens.
    """

    prompts: int = 0
    tokens: int = 0
    attended: int = 0
    elsewhere: int = 0
    elsewhere_attended: int = 0
    whole: int = 0

    def add(self, num_tokens: int, estimate: Estimate | None) -> None:
        num_to_compute = num_tokens if estimate is None else estimate.num_to_compute
        num_elsewhere = None if estimate is None else estimate.num_elsewhere
        if num_elsewhere is None:
            num_elsewhere = num_to_compute
        self.prompts += 1
        self.whole += num_tokens
        self.tokens += num_to_compute
        self.attended += _attended(num_to_compute, num_tokens)
        self.elsewhere += num_elsewhere
        self.elsewhere_attended += _attended(num_elsewhere, num_tokens)


def _attended(num_last: int, num_tokens: int) -> int:
    return num_last * num_tokens - num_last * num_last // 2
