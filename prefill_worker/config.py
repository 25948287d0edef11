"""Options of the prefill scheduler. Nothing here imports torch: the command line imports this module."""

from dataclasses import dataclass

from tandem.config import require_positive
from tandem.prefill_worker.policies.table import PREFILL_POLICIES


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Options of the prefill scheduler.

    Attributes:
        chunk_size: maximum number of prompt tokens in a forward pass, over all its requests.
        schedule: policy that orders the queue, a name in PREFILL_POLICIES or an import path package.module:Class: fcfs
            (first come first served), lpm (longest cached prefix), dfs-weight (depth first through shared prefixes),
            lof (longest output first) or random. Priority goes first.
        min_shared_tokens: a request waits for another one that is computing at least this many tokens of its prefix.
        grant_timeout_s: time for which a finished prefill waits for its grant before the router is asked for another
            decode worker. The computed pages stay cached.
        overlap: launch a forward pass before the previous one's results are known, on an asynchronous engine.
    """

    chunk_size: int = 512
    schedule: str = "fcfs"
    min_shared_tokens: int = 32
    grant_timeout_s: float = 60.0
    overlap: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "chunk_size", "min_shared_tokens", "grant_timeout_s")
        PREFILL_POLICIES.check("schedule", self.schedule)
