"""What a decode worker's scheduler can be told. Nothing here imports torch: the command line reads this too."""

from dataclasses import dataclass

from tandem.config import require, require_positive


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The decode scheduler.

    Attributes:
        max_batch_size: requests in one step at most.
        lease_duration_s: how long a lease lasts without a word from the prefill worker.
        admit_grace_s: how long a lease request may wait for its Admit, which comes on another stream, and how long the
            place of a request that is started again is held for its next lease request.
        max_overtaken: a request may be overtaken so often by later ones that fit while its first lease waits, and on
            later attempts by nobody: so this is the limit for its whole life.
        max_waiting: so many lease requests wait at most. For each one more the last in line is refused, and asks again
            later.
        overlap: on an asynchronous engine a step is launched before the tokens of the one before are known.
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
