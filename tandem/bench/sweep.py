"""Searches the highest rate or concurrency with enough good requests."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Variable = Literal["rate", "concurrency"]
VARIABLES: tuple[Variable, ...] = ("rate", "concurrency")
# Bisect until the interval is this share of its upper end.
RESOLUTION = 0.05
MAX_TRIALS = 30


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """Attributes: low, high: first value and upper bound."""

    variable: Variable
    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> "SweepConfig":
        """Parse "rate=1..20". Raises ValueError."""
        name, _, limits = text.partition("=")
        low_text, dots, high_text = limits.partition("..")
        if name not in VARIABLES or not dots:
            raise ValueError(f"a sweep is rate=LOW..HIGH or concurrency=LOW..HIGH, not {text!r}")
        low, high = float(low_text), float(high_text)
        if not (0 < low <= high < math.inf):
            raise ValueError(f"a sweep goes from a number above 0 to one that is not smaller, not {limits}")
        if name == "concurrency" and not (low.is_integer() and high.is_integer()):
            raise ValueError(f"a concurrency is a whole number, not {limits}")
        return cls("rate" if name == "rate" else "concurrency", low, high)


@dataclass(frozen=True, slots=True)
class Trial:
    value: float
    good_share: float
    result: dict[str, Any]


@dataclass(slots=True)
class SweepResult:
    """Attributes: highest: value with enough good requests; None: not even the lowest."""

    highest: float | None = None
    trials: list[Trial] = field(default_factory=list)


def sweep(config: SweepConfig, good_share: float, run: Callable[[float, int], Trial], into: SweepResult) -> None:
    """Double from the lowest value until too few requests are good, then bisect.

    Args:
        run: makes one run from a value and the run's number.
        into: gets each run as it ends, for stopped sweeps.
    """

    def is_good(value: float) -> bool:
        trial = run(value, len(into.trials))
        into.trials.append(trial)
        return trial.good_share >= good_share

    whole = config.variable == "concurrency"
    value = config.low
    bad: float | None = None
    while bad is None and len(into.trials) < MAX_TRIALS:
        if not is_good(value):
            bad = value
        else:
            into.highest = value
            if value == config.high:
                return
            value = min(2 * value, config.high)
    while into.highest is not None and bad is not None and len(into.trials) < MAX_TRIALS:
        if bad - into.highest <= (1 if whole else RESOLUTION * bad):
            return
        value = (into.highest + bad) / 2
        value = float(math.floor(value)) if whole else value
        if is_good(value):
            into.highest = value
        else:
            bad = value
