"""What a prefill worker's scheduler can be told. Nothing here imports torch: the command line reads this too."""

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
    """The prefill scheduler.

    Attributes:
        chunk_size: prompt tokens that one forward computes at most, over all its requests.
        schedule: which queued request starts next, by a name in PREFILL_POLICIES or by the import path
            package.module:Class of a policy of one's own: fcfs (first come first served), lpm (longest cached prefix),
            dfs-weight (depth first through shared prefixes), lof (longest output first) or random. Priority goes before
            it.
        min_shared_tokens: a request waits for another that is computing at least so many tokens of its prefix.
        grant_timeout_s: how long a finished prefill waits for pages at the decode worker before the router is asked
            to find another one; what was computed stays in the cache.
        overlap: on an asynchronous engine a forward is launched before the results of the one before are known.
    """

    chunk_size: int = 512
    min_shared_tokens: int = 32
    grant_timeout_s: float = 60.0
    overlap: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "chunk_size", "min_shared_tokens", "grant_timeout_s")
        PREFILL_POLICIES.check("schedule", self.schedule)
