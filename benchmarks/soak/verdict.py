"""Which values of which processes must be flat, and whether they were."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.soak.samples import VALUES, Life
from benchmarks.soak.slopes import Slope, common_slope

# Growth per hour that is allowed although the interval excludes 0.
# Memory: caches with limits of their own still fill (records of 64 MiB a worker, kept responses, radix trees), and an
# allocator's arenas spread. PSS has no bound: it changes with the number of processes that share a page.
# Threads, descriptors: gRPC's pool grows on a busy host. A leak by each of 120 faults an hour would be far above.
BOUNDS = {
    "anon MiB": 16.0,
    "shmem MiB": 2.0,
    "descriptors": 6.0,
    "threads": 6.0,
    "mappings": 60.0,
}
# Growth of one life that is no slope yet: two threads of a pool, a connection with its two ends, an allocator's arena.
STEPS = {"anon MiB": 1.0, "shmem MiB": 0.0, "descriptors": 2.0, "threads": 2.0, "mappings": 4.0}
# A life counts from this age on, and from its middle on. By then pools, caches and arenas are nearly full.
WARMUP_S = 300.0
MIN_WARMUP_S = 100.0
WARMUP_SHARE = 0.2
# A life counts if its samples after that span this time: a step of an allocator looks like a slope in a shorter one.
MIN_SPAN_S = 300.0


@dataclass(frozen=True, slots=True)
class Growth:
    """How one value of one kind of process went.

    Attributes:
        last: mean of the lives' last values.
        slope: None: all lives were too short.
    """

    kind: str
    value: str
    last: float
    slope: Slope | None

    @property
    def bound(self) -> float | None:
        return BOUNDS.get(self.value)

    @property
    def resolution(self) -> float | None:
        """The smallest growth per hour that is told from a single step."""
        step = STEPS.get(self.value)
        return None if self.slope is None or step is None else step * self.slope.per_step

    @property
    def is_flat(self) -> bool:
        if self.slope is None or self.bound is None or self.resolution is None:
            return True
        return self.slope.is_flat(max(self.bound, self.resolution))


def warmup_s(duration_s: float) -> float:
    return min(WARMUP_S, max(MIN_WARMUP_S, WARMUP_SHARE * duration_s))


def growths(lives: Iterable[Life], duration_s: float) -> list[Growth]:
    """Return all values of all kinds of processes, by kind."""
    lives = [life for life in lives if life.kind and life.times_s]
    warmup = warmup_s(duration_s)
    found = []
    for kind in sorted({life.kind for life in lives}):
        of_kind = [life for life in lives if life.kind == kind]
        for value in VALUES:
            late = [life.series(value, from_age_s=max(warmup, life.duration_s / 2)) for life in of_kind]
            long = [series for series in late if series.duration_s >= MIN_SPAN_S]
            last = sum(life.values[value][-1] for life in of_kind) / len(of_kind)
            found.append(Growth(kind, value, last, common_slope(long)))
    return found
