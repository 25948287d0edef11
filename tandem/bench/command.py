"""Runs `tandem bench`: one run or a sweep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.bench.config import BenchConfig
from tandem.bench.plots import gaps_figure, png, require_matplotlib, write_plots
from tandem.bench.processes import RunResult, run_processes
from tandem.bench.records import RequestRecord
from tandem.bench.report import write_report
from tandem.bench.results import make_result, read_result, write_records, write_result
from tandem.bench.runner import RunnerConfig
from tandem.bench.sweep import SweepConfig, SweepResult, Trial, sweep
from tandem.bench.terminal import LiveProgress, print_result, print_trials
from tandem.bench.workloads.table import make_sessions


@dataclass(frozen=True, slots=True)
class Outputs:
    result: Path | None = None
    requests: Path | None = None
    plots: Path | None = None
    report: Path | None = None

    def check(self) -> None:
        """Raises ValueError if a file cannot be written, before any measurement."""
        for file in (self.result, self.requests, self.report):
            if file is not None:
                _check_writable(file)
        if self.plots is not None and self.plots.exists() and not self.plots.is_dir():
            raise ValueError(f"{self.plots} is no directory")
        if self.plots is not None or self.report is not None:
            require_matplotlib()


def _check_writable(file: Path) -> None:
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file} cannot be written: there is no directory {file.absolute().parent}")
    is_new = not file.exists()
    if not is_new and not (file.is_file() or file.is_dir()):
        # Closing a pipe would end it for its reader.
        return
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from error


def run_once(config: BenchConfig, outputs: Outputs, console: Console) -> dict[str, Any]:
    """Measure, print and write one run; return its result.

    Raises ValueError for an invalid trace, EndpointError if the server cannot be measured, RuntimeError if a client
    process dies, OSError if a file cannot be written.
    """
    outputs.check()
    result, run = measure(config, console)
    print_result(console, result)
    _write(result, outputs, run.records)
    return result


def run_sweep(
    config: BenchConfig, swept: SweepConfig, good_share: float, outputs: Outputs, console: Console
) -> dict[str, Any]:
    """Find the highest value with enough good requests; print and write all completed runs.

    Returns the best run's result, or else the first's, with the sweep. Raises as `run_once`.
    """
    if outputs.requests is not None:
        raise ValueError("the requests of a sweep are not written: leave out --requests-out, or make single runs")
    outputs.check()
    assert config.slo is not None and config.arrivals is not None
    found, is_whole = SweepResult(), True

    def run(value: float, number: int) -> Trial:
        assert config.arrivals is not None
        at_rate = replace(config.arrivals, rate=value)
        arrivals = at_rate if swept.variable == "rate" else replace(config.arrivals, concurrency=int(value))
        # New prompts in each run, so that none is in the server's cache.
        workload = replace(config.workload, seed=config.workload.seed + number)
        result, _ = measure(replace(config, arrivals=arrivals, workload=workload), console)
        if not result["is_whole"]:
            raise KeyboardInterrupt
        share = result["goodput"]["good_share"]
        console.print(f"{swept.variable} {value:g}: {share:.1%} good", highlight=False)
        return Trial(value, share, result)

    try:
        sweep(swept, good_share, run, found)
    except KeyboardInterrupt:
        is_whole = False
        if not found.trials:
            raise
    best = next((trial for trial in found.trials if trial.value == found.highest), found.trials[0])
    described = {
        "variable": swept.variable,
        "low": swept.low,
        "good_share": good_share,
        "highest": found.highest,
        "trials": [{"value": one.value, "good_share": one.good_share, "result": one.result} for one in found.trials],
    }
    result = {**best.result, "sweep": described, "is_whole": is_whole}
    print_trials(console, described)
    print_result(console, result)
    _write(result, outputs, ())
    return result


def compare(files: Sequence[Path], out: Path) -> None:
    """Run `tandem bench report`. Raises ValueError if a file is not a result, OSError."""
    Outputs(report=out).check()
    write_report([read_result(file) for file in files], out)


def plot_gaps(files: Sequence[Path], out: Path) -> None:
    """Run `tandem bench plot`. Raises ValueError without gaps, OSError."""
    Outputs(report=out).check()
    figure = gaps_figure([read_result(file) for file in files])
    if figure is None:
        raise ValueError("none of these runs has a gap between two chunks")
    out.write_bytes(png(figure))


def measure(config: BenchConfig, console: Console) -> tuple[dict[str, Any], RunResult]:
    """Return a run's result and records. Raises as `run_once`, except for files."""
    sessions = make_sessions(config.workload, config.arrivals, config.duration_s)
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


def _write(result: dict[str, Any], outputs: Outputs, records: Sequence[RequestRecord]) -> None:
    """Write every file that can be written, because runs are costly. Raises OSError."""
    failures = []
    writes: list[tuple[Path | None, Callable[[Path], None]]] = [
        (outputs.result, lambda file: write_result(result, file)),
        (outputs.requests, lambda file: write_records(records, file)),
        (outputs.plots, lambda directory: write_plots([result], directory)),
        (outputs.report, lambda file: write_report([result], file)),
    ]
    for path, write in writes:
        try:
            if path is not None:
                write(path)
        except OSError as error:
            failures.append(f"{path} cannot be written: {error.strerror}")
    if failures:
        raise OSError("; ".join(failures))
