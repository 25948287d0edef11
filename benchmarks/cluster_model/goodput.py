"""The highest rate at which nine in ten requests meet their objectives, by `tandem bench`'s own definitions."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.cluster_model.cluster import Layout, ModelCluster
from benchmarks.cluster_model.device import H200_8B, DeviceFactors
from benchmarks.cluster_model.workloads import Stretch, Workload, conversations
from tandem.bench.measures import RequestMeasures
from tandem.bench.records import RequestRecord
from tandem.router.workers.objectives import Objectives

GOOD_SHARE = 0.9
# Between two rates that are tried; what is between the last good and the first bad one is interpolated.
STEP = 1.03
# It is looked for among so many rates below what workers can compute at all, and some above: that is an estimate.
NUM_STEPS = 70


# So long the longest outputs may take: until then there are more and more requests under way.
WARMUP_S_PER_TOKEN = 0.04
MIN_WARMUP_S = 20.0
MEASURED_S = 40.0


@dataclass(frozen=True, slots=True)
class Duration:
    """Of each run, in seconds. Attributes: warmup: requests that come before it are left out."""

    warmup: float
    end: float

    @classmethod
    def of(cls, workload: Workload) -> "Duration":
        warmup = max(MIN_WARMUP_S, WARMUP_S_PER_TOKEN * workload.num_output)
        return cls(warmup, warmup + MEASURED_S)


class Served(NamedTuple):
    """How one request was served, in seconds. Attributes: itl_p95, itl_max: of its own gaps."""

    ttft: float
    itl_p95: float
    itl_max: float

    @classmethod
    def of(cls, record: RequestRecord) -> "Served":
        measures = RequestMeasures.of(record)
        return cls(measures.ttft or 0.0, measures.itl_p95 or 0.0, measures.itl_max or 0.0)

    def meets(self, objectives: Objectives) -> bool:
        # One gap is nothing to a percentile, however long it is: who waits for a decode worker waits behind the first
        # token, and must not do so for longer than for that.
        return max(self.ttft, self.itl_max) <= objectives.ttft_s and self.itl_p95 <= objectives.itl_s


class GoodputModel:
    """Runs clusters at one rate after the other, each once."""

    def __init__(self, seed: int = 0, device: DeviceFactors = H200_8B, duration: Duration | None = None) -> None:
        """Args: duration: None: as it suits the workload."""
        self._duration = duration
        self._seed = seed
        self._device = device
        self._served: dict[tuple[Layout, Workload, Objectives | None, float], list[Served]] = {}

    def share(self, layout: Layout, workload: Workload, objectives: Objectives, rate: float) -> float:
        """Of the requests at that rate those that meet both."""
        served = self._serve(layout, workload, objectives, rate)
        return sum(one.meets(objectives) for one in served) / max(1, len(served))

    def _serve(self, layout: Layout, workload: Workload, objectives: Objectives, rate: float) -> list["Served"]:
        key = layout, workload, objectives if layout.knows_objectives else None, rate
        if key not in self._served:
            duration = self._duration or Duration.of(workload)
            edges = 0.0, duration.warmup, duration.end
            stretches = [Stretch(workload, begin, end, rate) for begin, end in itertools.pairwise(edges)]
            cluster = ModelCluster(layout, objectives, seed=self._seed, device=self._device)
            records = cluster.run(list(conversations(stretches, self._seed)))
            counted = [r for r in records if duration.warmup <= r.due_s < duration.end]
            self._served[key] = [Served.of(record) for record in counted]
        return self._served[key]

    def goodput(self, layout: Layout, workload: Workload, objectives: Objectives) -> float:
        """In requests a second; 0 if even the lowest rate that is tried has too few."""
        high = self._most(len(layout.roles), workload)
        low_number, high_number = -NUM_STEPS, NUM_STEPS // 4
        shares = {high_number: 0.0}
        while high_number - low_number > 1:
            number = (low_number + high_number) // 2
            shares[number] = self.share(layout, workload, objectives, high * STEP**number)
            if shares[number] >= GOOD_SHARE:
                low_number = number
            else:
                high_number = number
        if low_number not in shares:
            return 0.0
        below, above = shares[low_number], shares[high_number]
        part = (below - GOOD_SHARE) / (below - above)
        return high * STEP ** (low_number + part)

    def _most(self, num_workers: int, workload: Workload) -> float:
        """About as many requests a second as workers can compute, whoever does what."""
        device = self._device
        context = workload.num_system + workload.num_input + workload.num_output / 2
        context += (workload.num_turns - 1) * (workload.num_input + workload.num_output) / 2
        prompt = device.prompt[1] * workload.num_input
        steps = workload.num_output * (device.step[1] + device.step[2] * context)
        return num_workers / (prompt + steps)
