"""The scenarios: loads in multiples of one worker, bounds, and the windows in which goodput is compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.elastic.load import Curve, daily, steps

# A swing's calm before it, its duration, and the times at its top and after it, in seconds.
CALM_S, RAMP_S, TOP_S, REST_S = 120.0, 60.0, 180.0, 240.0
# Time after a swing in which goodput is compared.
AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """
    Attributes:
        load: multiples of what one worker serves, over time.
        first: workers at the beginning.
        windows: (name, begin, end) of comparisons with the oracle.
        window_s: the oracle's.
        fixed: numbers of workers of fixed layouts.
        turn_s: interval between turns of the planners.
        plays: replay the trace's own arrivals, faster or slower, instead of Poisson arrivals.
    """

    name: str
    load: Curve
    low: int
    high: int
    first: int
    windows: Sequence[tuple[str, float, float]] = ()
    window_s: float = 30.0
    fixed: Sequence[int] = ()
    turn_s: float = 0.5
    deaths_per_hour: float = 0.0
    plays: bool = False

    @property
    def length_s(self) -> float:
        return self.load[-1][0]


def swing(hours: float) -> Scenario:
    """Half a worker's load, ten times as much within a minute, and the way back."""
    rise, fall = CALM_S + RAMP_S, CALM_S + RAMP_S + TOP_S + RAMP_S
    load = steps(0.5, (CALM_S, 0.5), (RAMP_S, 5.0), (TOP_S, 5.0), (RAMP_S, 0.5), (REST_S, 0.5))
    windows = (("after the rise", rise, rise + AFTER_S), ("after the fall", fall, fall + AFTER_S))
    return Scenario("swing", load, 1, 8, 1, windows, fixed=(1, 3, 8))


def cold(hours: float) -> Scenario:
    """No worker and no load, then the load of two workers at once."""
    load = steps(0.0, (30.0, 0.0), (1.0, 2.0), (300.0, 2.0), (1.0, 0.0), (700.0, 0.0))
    return Scenario("cold start", load, 0, 8, 0, (("after the start", 31.0, 31.0 + AFTER_S),), fixed=(3,))


def constant(hours: float) -> Scenario:
    return Scenario("constant", steps(3.3, (3600.0 * hours, 3.3)), 1, 8, 4, window_s=600.0, fixed=(4,), turn_s=1.0)


def deaths(hours: float) -> Scenario:
    """Constant load; the deaths of a day, 2 % of the workers an hour, fall into these hours."""
    load = steps(5.5, (3600.0 * hours, 5.5))
    share = 0.02 * 24.0 / hours
    return Scenario("deaths", load, 1, 10, 7, window_s=600.0, fixed=(7,), turn_s=1.0, deaths_per_hour=share)


def day(hours: float) -> Scenario:
    """The trace over and over, faster and slower by the daily curve. A short day is steeper than a real one."""
    load = daily(6.0, hours)
    return Scenario("day", load, 1, 10, 1, window_s=3600.0 * hours / 96, fixed=(3, 7), turn_s=1.0, plays=True)


SCENARIOS: dict[str, Callable[[float], Scenario]] = {
    "swing": swing,
    "cold": cold,
    "constant": constant,
    "deaths": deaths,
    "day": day,
}
