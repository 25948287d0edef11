"""Options of the decode scheduler. Nothing here imports torch: the command line imports this module."""

from dataclasses import dataclass

from tandem.config import require, require_positive


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Options of the decode scheduler.

    Attributes:
        max_batch_size: maximum number of requests in a decode step.
        lease_duration_s: time after which a lease expires without messages from the prefill worker.
        admit_grace_s: time for which a lease request waits for its Admit, which comes on another stream, and for which
            a restarted request's place in the queue is held.
        max_overtaken: maximum number of younger leases granted before a request's lease, over all its attempts.
        max_waiting: maximum number of waiting lease requests. Beyond it the last in the queue is refused, and its
            sender asks again.
        overlap: launch a step before the previous step's tokens are known, on an asynchronous engine.
    """

    max_batch_size: int = 64
    lease_duration_s: float = 30.0
    admit_grace_s: float = 2.0
    max_overtaken: int = 8
    max_waiting: int = 1024
    overlap: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "max_batch_size", "lease_duration_s", "admit_grace_s", "max_waiting")
        require(self.max_overtaken >= 0, "max_overtaken must not be negative")
