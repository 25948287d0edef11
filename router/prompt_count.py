"""How much there is to compute of the prompts that a router assigns: what a planner of roles asks for."""

from dataclasses import dataclass

from router.worker import Estimate


@dataclass(slots=True)
class PromptCount:
    """Prompts that a router has assigned to workers since it began, those of further attempts included.

    Attributes:
        tokens: of them, those that were not expected to be cached.
        attended: how many tokens these attend to, added up.
        anywhere: those that would have been computed by workers that have the fewest cached.
    """

    prompts: int = 0
    tokens: int = 0
    attended: int = 0
    anywhere: int = 0

    def add(self, num_tokens: int, estimate: Estimate | None) -> None:
        """Args: num_tokens: of the prompt; estimate: of what becomes of it; None: nobody has made one."""
        num_to_compute = num_tokens if estimate is None else estimate.num_to_compute
        num_anywhere = None if estimate is None else estimate.num_anywhere
        self.prompts += 1
        self.anywhere += num_to_compute if num_anywhere is None else num_anywhere
        self.tokens += num_to_compute
        self.attended += num_to_compute * num_tokens - num_to_compute * num_to_compute // 2
