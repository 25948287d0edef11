"""How much there is to compute of the prompts that a router assigns: what a planner of roles asks for."""

from dataclasses import dataclass

from tandem.router.workers.worker import Estimate


@dataclass(slots=True)
class PromptCount:
    """Prompts that a router has assigned to workers since it began, those of further attempts included.

    Attributes:
        tokens: of them, those that were not expected to be cached.
        attended: how many tokens these attend to, added up.
        elsewhere, elsewhere_attended: the same of those that half of the workers or more would have had to compute.
    """

    prompts: int = 0
    tokens: int = 0
    attended: int = 0
    elsewhere: int = 0
    elsewhere_attended: int = 0

    def add(self, num_tokens: int, estimate: Estimate | None) -> None:
        """Args: num_tokens: of the prompt; estimate: of what becomes of it; None: nobody has made one."""
        num_to_compute = num_tokens if estimate is None else estimate.num_to_compute
        num_elsewhere = None if estimate is None else estimate.num_elsewhere
        if num_elsewhere is None:
            num_elsewhere = num_to_compute
        self.prompts += 1
        self.tokens += num_to_compute
        self.attended += _attended(num_to_compute, num_tokens)
        self.elsewhere += num_elsewhere
        self.elsewhere_attended += _attended(num_elsewhere, num_tokens)


def _attended(num_last: int, num_tokens: int) -> int:
    """How many tokens the last ones of a prompt attend to, added up."""
    return num_last * num_tokens - num_last * num_last // 2
