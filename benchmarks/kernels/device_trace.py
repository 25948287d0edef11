"""Reads kernels and the GPU's idle time between decode steps from a profiler's trace. Times are in microseconds."""

import bisect
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# The kernels of one CUDA graph launch share a correlation id; any other launch is one kernel.
_MIN_GRAPH_KERNELS = 8
# Without graphs, a step ends with a kernel whose name contains this.
_LAST_KERNEL = "argmax"


class DeviceEvent(NamedTuple):
    """A kernel, copy or fill. Attributes: launch: correlation id."""

    name: str
    start: float
    end: float
    launch: int
    is_kernel: bool


class Span(NamedTuple):
    start: float
    end: float


class KernelUse(NamedTuple):
    """Attributes: num_calls, time: per step."""

    name: str
    num_calls: float
    time: float


def read_trace(path: Path) -> list[DeviceEvent]:
    """Read the device events of a trace in Chrome's JSON format, by start."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [
        DeviceEvent(
            raw["name"],
            float(raw["ts"]),
            float(raw["ts"]) + float(raw["dur"]),
            int(raw["args"]["correlation"]),
            raw["cat"] == "kernel",
        )
        for raw in json.loads(text)["traceEvents"]
        if raw.get("ph") == "X" and raw.get("cat") in _DEVICE_CATEGORIES
    ]
    return sorted(events, key=lambda event: event.start)


def find_steps(events: Sequence[DeviceEvent]) -> list[Span]:
    """Return each step from its first model kernel to its last.

    A step is one CUDA graph launch, or without graphs ends with the argmax kernel. Raises ValueError without either.
    """
    kernels = [event for event in events if event.is_kernel]
    launches: dict[int, list[DeviceEvent]] = {}
    for kernel in kernels:
        launches.setdefault(kernel.launch, []).append(kernel)
    graphs = [launch for launch in launches.values() if len(launch) >= _MIN_GRAPH_KERNELS]
    if graphs:
        return sorted(Span(launch[0].start, max(kernel.end for kernel in launch)) for launch in graphs)
    last = [number for number, kernel in enumerate(kernels) if _LAST_KERNEL in kernel.name.lower()]
    if not last:
        raise ValueError(f"the trace has neither graphs nor a kernel called {_LAST_KERNEL}")
    return [Span(kernels[before + 1].start, kernels[end].end) for before, end in itertools.pairwise(last)]


def gaps_between(steps: Sequence[Span]) -> list[Span]:
    return [Span(before.end, after.start) for before, after in itertools.pairwise(steps)]


def idle_times(events: Sequence[DeviceEvent], gaps: Sequence[Span]) -> list[float]:
    """Return the time of each gap during which nothing ran, not even a copy."""
    starts = [event.start for event in events]
    idle = []
    for gap in gaps:
        time, busy_until = 0.0, gap.start
        for event in events[bisect.bisect_left(starts, gap.start) : bisect.bisect_left(starts, gap.end)]:
            time += max(0.0, event.start - busy_until)
            busy_until = max(busy_until, event.end)
        idle.append(time + max(0.0, gap.end - busy_until))
    return idle


def kernel_uses(events: Sequence[DeviceEvent], steps: Sequence[Span]) -> list[KernelUse]:
    """Return the uses by name, from the first step's start to the last one's, longest first."""
    num_steps = len(steps) - 1
    counts: Counter[str] = Counter()
    times: dict[str, float] = {}
    for event in events:
        if steps[0].start <= event.start < steps[-1].start:
            counts[event.name] += 1
            times[event.name] = times.get(event.name, 0.0) + event.end - event.start
    uses = [KernelUse(name, count / num_steps, times[name] / num_steps) for name, count in counts.items()]
    return sorted(uses, key=lambda use: -use.time)
