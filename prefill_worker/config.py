"""Options of the prefill scheduler. Nothing here imports torch: the command line imports this module."""

from dataclasses import dataclass

from tandem.config import require_positive
from tandem.options import option
from tandem.prefill_worker.policies.table import PREFILL_POLICIES


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """Options of `tandem serve` that every prefill scheduler takes as given."""

    schedule: str = option(
        "fcfs",
        "which queued prompt is computed next",
        choices=PREFILL_POLICIES.names,
        takes_path=True,
    )


@dataclass(frozen=True, slots=True)
class PrefillConfig(PrefillOptions):
    """Options of the prefill scheduler.

    Attributes:
        schedule: fcfs (first come first served), lpm (longest cached prefix), dfs-weight (depth first through shared
            prefixes), lof (longest output first), random, or package.module:Class.
        min_shared_tokens: a request waits for another that computes at least this many tokens of its prefix.
        grant_timeout_s: wait for a grant before the router looks for another decode worker. Computed pages stay cached.
        overlap: launch a forward pass before the previous results are known, on an asynchronous engine.
    """

    chunk_size: int = 512
    min_shared_tokens: int = 32
    grant_timeout_s: float = 60.0
    overlap: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "chunk_size", "min_shared_tokens", "grant_timeout_s")
        PREFILL_POLICIES.check("schedule", self.schedule)
