"""One replay of arrivals on a cluster, and its result."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.elastic.clients import Arrival
from benchmarks.elastic.events import Events
from benchmarks.elastic.fleet import Fleet, Setup, SizerMaker, Usage
from benchmarks.elastic.outcome import Limits, Seen, between, good_share, num_good, ttft_at
from benchmarks.elastic.step_times import StepTimes

# Time after the last arrival for the requests in hand.
REST_S = 120.0


@dataclass(frozen=True, slots=True)
class Replay:
    """
    Attributes:
        gpu_s: time of all workers during the arrivals, starts included.
        cpu_s: CPU time of the simulation.
    """

    requests: list[Seen]
    usage: Usage
    limits: Limits
    gpu_s: float
    cpu_s: float

    @property
    def gpu_hours(self) -> float:
        return self.gpu_s / 3600

    @property
    def share(self) -> float:
        return good_share(self.requests, self.limits)

    def num_good(self, begin: float = 0.0, end: float = float("inf")) -> int:
        return num_good(between(self.requests, begin, end), self.limits)

    def ttft_p99(self) -> float:
        return ttft_at(self.requests, 99)

    @property
    def num_restarted(self) -> int:
        return sum(seen.num_attempts > 1 for seen in self.requests)

    @property
    def num_failed(self) -> int:
        return sum(bool(seen.failure) or seen.ended_at is None for seen in self.requests)


def replay(
    arrivals: Iterable[Arrival], times: StepTimes, setup: Setup, make_sizer: SizerMaker, length_s: float
) -> Replay:
    began = time.process_time()
    events = Events()
    fleet = Fleet(events, times, setup, make_sizer)
    fleet.clients.send_all(iter(arrivals))
    events.run_until(length_s)
    gpu_s = fleet.usage.ended_s + sum(events.now - life.began for life in fleet.lives)
    # Requests in hand still end, but a sizer's opinion of an empty trace does not count.
    num_changes = len(fleet.usage.changes)
    events.run_until(length_s + REST_S)
    fleet.close()
    usage = replace(fleet.usage, changes=fleet.usage.changes[:num_changes])
    return Replay(fleet.clients.seen, usage, setup.limits, gpu_s, time.process_time() - began)
