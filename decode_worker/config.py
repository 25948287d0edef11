"""Options of the decode scheduler. Nothing here imports torch: the command line imports this module."""

from dataclasses import dataclass, field

from tandem.config import require, require_positive
from tandem.decode_worker.drafters.table import DRAFTERS
from tandem.decode_worker.speculation import AUTO_SPECULATION, NO_SPECULATION, model_sources, parse_speculation
from tandem.options import option


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    speculation: str = option(
        "",
        "source of drafts, which a decode step checks at once; ngram: earlier parts of the request's own tokens; auto: "
        "those of ngram that are expected to gain time; draft: a small model; eagle: an EAGLE-3 head; mtp: the model's "
        "own layer for further tokens",
        choices=(NO_SPECULATION, AUTO_SPECULATION, *DRAFTERS.names, *model_sources()),
        takes_path=True,
        shown="auto with one rank a worker, else off",
        detail=" ([speculation.md](speculation.md))",
    )
    speculation_shared: bool = option(
        False,
        "let ngram and auto draft from finished outputs of the same API key and cache namespace too; needs API keys",
        detail=" ([speculation.md](speculation.md#other-requests))",
    )


@dataclass(frozen=True, slots=True)
class DecodeConfig(DecodeOptions):
    """Options of the decode scheduler, which drafts nothing unless it is told to.

    Attributes:
        max_batch_size: maximum number of requests in a decode step.
        lease_duration_s: time without sender messages after which a lease expires.
        admit_grace_s: time for which a LeaseRequest waits for its Admit, and a restarted request's place is held.
        max_overtaken: maximum number of younger leases granted before a request's, over all attempts.
        max_waiting: limit of waiting lease requests; beyond it the last is refused and asks again.
        overlap: launch a step before the previous tokens are known, on an asynchronous engine.
        itl_objective_s: expected time of a step with drafts of `auto` at most; 0 for no limit.
    """

    speculation: str = field(default=NO_SPECULATION, kw_only=True)
    max_batch_size: int = 64
    lease_duration_s: float = 30.0
    admit_grace_s: float = 2.0
    max_overtaken: int = 8
    max_waiting: int = 1024
    overlap: bool = True
    itl_objective_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "max_batch_size", "lease_duration_s", "admit_grace_s", "max_waiting")
        require(self.max_overtaken >= 0, "max_overtaken must not be negative")
        require(
            parse_speculation(self.speculation).is_lookup or not self.speculation_shared,
            f"speculation_shared is for `speculation` auto and ngram, not {self.speculation}: leave it out, or use one "
            "of these",
        )
