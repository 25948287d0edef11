"""`tandem bench`: one run, from its configuration to its figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.config import BenchConfig
from bench.processes import RunResult, run_processes
from bench.results import make_result, write_records, write_result
from bench.runner import RunnerConfig
from bench.terminal import LiveProgress, print_result
from bench.workloads.table import make_sessions


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go besides the terminal; None: nowhere."""

    result: Path | None = None
    requests: Path | None = None
    plots: Path | None = None
    report: Path | None = None


def measure(config: BenchConfig, console: Console) -> tuple[dict[str, Any], RunResult]:
    """One run; returns its result and what it was computed from.

    Raises:
        ValueError: the trace cannot be used.
        EndpointError: the server cannot be measured.
        RuntimeError: a client process has died.
    """
    sessions = make_sessions(config.workload, config.arrivals)
    num_requests = sum(len(session.turns) for session in sessions if session.group == "requests")
    runner = RunnerConfig(
        concurrency=1 if config.arrivals is None else config.arrivals.concurrency,
        duration_s=config.duration_s,
        warmup_requests=config.warmup_requests,
        warmup_s=config.warmup_s,
        ignore_eos=config.endpoint.ignore_eos,
    )
    with LiveProgress(console, num_requests) as progress:
        run = run_processes(config.endpoint, runner, sessions, config.num_processes, progress.show)
    return make_result(config, run), run


def run_once(config: BenchConfig, outputs: Outputs, console: Console) -> dict[str, Any]:
    """Measures, prints and writes. Raises as `measure`, and OSError if a file cannot be written."""
    result, run = measure(config, console)
    print_result(console, result)
    if outputs.requests is not None:
        write_records(run.records, outputs.requests)
    if outputs.result is not None:
        write_result(result, outputs.result)
    write_pictures([result], outputs)
    return result


def write_pictures(results: list[dict[str, Any]], outputs: Outputs) -> None:
    """Raises OSError."""
    if outputs.plots is None and outputs.report is None:
        return
    # What draws is slow to import.
    from bench.plots import write_plots
    from bench.report import write_report

    if outputs.plots is not None:
        write_plots(results, outputs.plots)
    if outputs.report is not None:
        write_report(results, outputs.report)
