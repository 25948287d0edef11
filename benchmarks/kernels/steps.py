"""Kernels of a decode step by name, and the GPU's idle time between two steps.

Three runs, because tracing slows the host: untraced, for the time between CUDA graphs; tracing the device, for the
table of kernels; and tracing the host too, for Perfetto (https://ui.perfetto.dev). The host's ranges are plan (page
tables), launch (a whole forward) and collect (waiting for tokens). With --nsys they are NVTX ranges instead:
    nsys profile --capture-range=cudaProfilerApi --cuda-graph-trace=node python -m benchmarks.kernels step --nsys ...
"""

import argparse
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity

from benchmarks.engine_limits import measure_limits
from benchmarks.engine_loop import PAGE_SIZE, Loop, build_loop
from benchmarks.kernels.device_trace import (
    DeviceEvent,
    find_steps,
    gaps_between,
    idle_times,
    kernel_uses,
    read_trace,
)
from benchmarks.kernels.stages import Stage, step_stages
from tandem.bench.measures import percentile
from tandem.engine.attention.base import AttentionBackend, GraphedAttention
from tandem.engine.base import EngineBase, ForwardOutput
from tandem.engine.floors import Limits
from tandem.engine.models.config import ModelConfig

PREFILL_LEN = 4096
NUM_WARMUP_STEPS = 50
# Enough for Perfetto: each step is hundreds of kernels.
NUM_TRACED_STEPS = 10
# Keeps the batch full in all measured steps.
NUM_SPARE_TOKENS = 20
MAX_ROWS = 30
MAX_NAME = 90
RANGES: tuple[tuple[type, str, str], ...] = (
    (AttentionBackend, "plan", "plan"),
    (GraphedAttention, "plan", "plan"),
    (EngineBase, "forward", "launch"),
    (ForwardOutput, "token_ids", "collect"),
)


def annotate(range_of: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Wrap every implementation of RANGES' methods in a named range."""
    for base, method, name in RANGES:
        for cls in _subclasses(base):
            if method in vars(cls) and method not in getattr(cls, "__abstractmethods__", ()):
                setattr(cls, method, _in_range(vars(cls)[method], functools.partial(range_of, name)))


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _in_range(method: Callable[..., Any], enter: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with enter():
            return method(*args, **kwargs)

    return run


def profile(activities: Sequence[ProfilerActivity], path: Path, run: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


@dataclass(frozen=True)
class GraphLaunch:
    """Attributes: late: host seconds of the launch, if the device ran out of work by its end; else 0."""

    before: torch.cuda.Event
    after: torch.cuda.Event
    late: float


class GraphGaps:
    """Records an event before and after every CUDA graph launch in its context."""

    def __init__(self) -> None:
        self.launches: list[GraphLaunch] = []
        self._replay = torch.cuda.CUDAGraph.replay

    def __enter__(self) -> "GraphGaps":
        def replay(graph: torch.cuda.CUDAGraph) -> None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            began = time.perf_counter()
            self._replay(graph)
            took = time.perf_counter() - began
            late = before.query()
            after.record()
            self.launches.append(GraphLaunch(before, after, took if late else 0.0))

        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]

    def microseconds(self) -> list[float]:
        """Return the time from each graph's end to the next start, including copies and a late launch."""
        torch.cuda.synchronize()
        pairs = itertools.pairwise(self.launches)
        return [one.after.elapsed_time(other.before) * 1e3 + other.late * 1e6 for one, other in pairs]


class StepProfiler:
    def __init__(self, loop: Loop, batch_size: int, prompt_len: int) -> None:
        self._loop = loop
        self._batch_size = batch_size
        self._prompt_len = prompt_len

    def run_steps(self, num_steps: int, within: Callable[[Callable[[], None]], None]) -> None:
        """Fill the batch, warm up, and pass `within` a function that decodes `num_steps` steps."""
        max_tokens = NUM_WARMUP_STEPS + num_steps + NUM_SPARE_TOKENS
        self._loop.start(self._batch_size, self._prompt_len, max_tokens)
        self._loop.decode(NUM_WARMUP_STEPS)
        within(lambda: self._loop.decode(num_steps))
        self._loop.finish()

    def device_events(self, num_steps: int) -> list[DeviceEvent]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "steps.json"
            self.run_steps(num_steps, lambda run: profile([ProfilerActivity.CUDA], path, run))
            return read_trace(path)

    def graph_gaps(self, num_steps: int) -> list[float]:
        """Return microseconds between untraced graphs; empty without graphs."""
        with GraphGaps() as gaps:
            self.run_steps(num_steps, lambda run: run())
        return gaps.microseconds()[NUM_WARMUP_STEPS:num_steps]

    def prefill(self, prompt_len: int) -> None:
        self._loop.run([(prompt_len, 1)])


def show(events: Sequence[DeviceEvent], graph_gaps: Sequence[float], num_layers: int, console: Console) -> None:
    # The profiler may miss parts of the first and last step.
    steps = find_steps(events)[1:-1]
    gaps = gaps_between(steps)
    uses = kernel_uses(events, steps)
    busy = sum(use.time for use in uses)
    table = Table("kernel", title="One decode step")
    for column in ("per step", "per layer", "µs per step", "share"):
        table.add_column(column, justify="right")
    for use in uses[:MAX_ROWS]:
        name = use.name.removeprefix("void ")[:MAX_NAME]
        per_layer = f"{use.num_calls / num_layers:.2f}"
        table.add_row(name, f"{use.num_calls:.1f}", per_layer, f"{use.time:.1f}", f"{use.time / busy:.1%}")
    if rest := uses[MAX_ROWS:]:
        num_calls, time = sum(use.num_calls for use in rest), sum(use.time for use in rest)
        table.add_row(
            "others", f"{num_calls:.1f}", f"{num_calls / num_layers:.2f}", f"{time:.1f}", f"{time / busy:.1%}"
        )
    console.print(table)
    table = Table("µs", title=f"{len(steps)} steps")
    for column in ("p50", "p99", "max"):
        table.add_column(column, justify="right")
    rows = {
        "from one step's start to the next one's": [
            after.start - before.start for before, after in itertools.pairwise(steps)
        ],
        "first kernel to last": [step.end - step.start for step in steps],
        "last kernel to the next step's first": [gap.end - gap.start for gap in gaps],
        "of that idle, without copies": idle_times(events, gaps),
    }
    if graph_gaps:
        rows["between two graphs, with nothing traced"] = list(graph_gaps)
    for name, values in rows.items():
        in_order = sorted(values)
        table.add_row(name, *(f"{percentile(in_order, percent):.1f}" for percent in (50, 99, 100)))
    console.print(table)


def show_floors(stages: Sequence[Stage], limits: Limits, console: Console) -> None:
    table = Table("what", title="Floors of one decode step")
    for column in ("GB read", "GFLOP", "µs per step"):
        table.add_column(column, justify="right")
    for stage in stages:
        floor = f"{stage.floor(limits):.1f}"
        table.add_row(stage.name, f"{stage.num_bytes / 1e9:.3f}", f"{stage.flops / 1e9:.1f}", floor)
    table.add_section()
    table.add_row("sum", "", "", f"{sum(stage.floor(limits) for stage in stages):.1f}")
    console.print(table)


def profile_steps(arguments: argparse.Namespace, model: ModelConfig) -> None:
    max_tokens = NUM_WARMUP_STEPS + arguments.num_steps + NUM_SPARE_TOKENS
    num_tokens = arguments.batch_size * (arguments.prompt_len + max_tokens + PAGE_SIZE)
    prefill_len = min(PREFILL_LEN, model.max_position_embeddings)
    loop = build_loop(arguments, max(num_tokens, prefill_len), arguments.batch_size, lambda doing: None)
    profiler = StepProfiler(loop, arguments.batch_size, arguments.prompt_len)
    profiler.prefill(prefill_len)
    if arguments.nsys:
        annotate(torch.cuda.nvtx.range)
        # One range only: nsys ends the program after the first.
        with torch.cuda.profiler.profile():
            profiler.prefill(prefill_len)
            profiler.run_steps(NUM_TRACED_STEPS, lambda run: run())
        return
    console = Console(width=150)
    graph_gaps = profiler.graph_gaps(arguments.num_steps)
    show(profiler.device_events(arguments.num_steps), graph_gaps, model.num_layers, console)
    kv_len = arguments.prompt_len + NUM_WARMUP_STEPS + arguments.num_steps // 2
    stages = list(step_stages(model, arguments.batch_size, kv_len, arguments.kv_cache_dtype))
    show_floors(stages, measure_limits(), console)
    annotate(torch.profiler.record_function)
    arguments.out.mkdir(parents=True, exist_ok=True)
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    decode, prefill = arguments.out / "decode.json.gz", arguments.out / "prefill.json.gz"
    profiler.run_steps(NUM_TRACED_STEPS, lambda run: profile(both, decode, run))
    profile(both, prefill, lambda: profiler.prefill(prefill_len))
    console.print(f"traces: {decode} and {prefill}")
