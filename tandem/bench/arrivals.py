"""Arrival times of sessions."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ArrivalKind = Literal["closed", "poisson", "gamma", "constant", "burst"]
ARRIVALS: tuple[ArrivalKind, ...] = ("closed", "poisson", "gamma", "constant", "burst")


@dataclass(frozen=True, slots=True)
class ArrivalConfig:
    """
    Attributes:
        rate: mean sessions per second; unused by "closed".
        burstiness: shape of "gamma": 1 is Poisson, less is more clustered. Gaps have the mean 1 / rate and the variance
            1 / (burstiness * rate ** 2).
        burst_size: sessions per burst.
        concurrency: sessions in flight, for "closed".
    """

    kind: ArrivalKind = "closed"
    rate: float = 0.0
    burstiness: float = 1.0
    burst_size: int = 1
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ARRIVALS:
            raise ValueError(f"arrivals are one of {', '.join(ARRIVALS)}, not {self.kind!r}")
        if self.kind != "closed" and not 0 < self.rate < float("inf"):
            raise ValueError(f"arrivals {self.kind!r} need a rate above 0 (--rate)")
        if not 0 < self.burstiness < float("inf"):
            raise ValueError(f"the burstiness must be above 0, not {self.burstiness}")
        if min(self.burst_size, self.concurrency) < 1:
            raise ValueError("the burst size and the concurrency must be at least 1")


def arrival_times(config: ArrivalConfig, seed: int) -> Iterator[float | None]:
    """Yield endless seconds from the run's start; None for each session of "closed"."""
    rng = random.Random(f"{seed}/arrivals")
    moment, number = 0.0, 0
    while True:
        match config.kind:
            case "closed":
                yield None
            case "poisson":
                moment += rng.expovariate(config.rate)
                yield moment
            case "gamma":
                moment += rng.gammavariate(config.burstiness, 1 / (config.rate * config.burstiness))
                yield moment
            case "constant":
                yield number / config.rate
            case "burst":
                yield number // config.burst_size * config.burst_size / config.rate
        number += 1
