"""What a decode worker's scheduler can be told. Nothing here imports torch: the command line reads this too."""

from dataclasses import dataclass

from tandem.config import require_positive


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The decode scheduler.

    Attributes:
        max_batch_size: requests in one step at most.
        lease_duration_s: how long a lease lasts without a word from the prefill worker.
        admit_grace_s: how long a lease request may wait for its Admit, which comes on another stream.
        overlap: on an asynchronous engine a step is launched before the tokens of the one before are known.
    """

    max_batch_size: int = 64
    lease_duration_s: float = 30.0
    admit_grace_s: float = 2.0
    overlap: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "max_batch_size", "lease_duration_s", "admit_grace_s")
