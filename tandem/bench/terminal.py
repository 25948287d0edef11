"""Progress and results in a terminal."""

from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from tandem.bench.runner import Progress
from tandem.printable import printable

# Below this share, the cost of a chunk cannot be estimated.
_TELLING_CPU_SHARE = 0.3
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_ROWS = (
    ("ttft", "TTFT"),
    ("ttft_from_sent", "TTFT from sent"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("itl_p95", "ITL p95 of a request"),
    ("itl_max", "longest gap of a request"),
    ("e2e", "E2E"),
)


class LiveProgress:
    """One line of progress; shows nothing without a terminal."""

    def __init__(self, console: Console, num_requests: int) -> None:
        self._num_requests = num_requests
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._before = (0.0, 0)

    def __enter__(self) -> "LiveProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, seconds: float, progress: list[Progress]) -> None:
        if self._live is None:
            return
        ended, sent, failed, tokens = (
            sum(getattr(one, name) for one in progress)
            for name in ("num_ended", "num_sent", "num_failed", "num_tokens")
        )
        before_s, before_tokens = self._before
        rate = (tokens - before_tokens) / (seconds - before_s) if seconds - before_s > 0.1 else 0.0
        if seconds - before_s > 1.0:
            self._before = (seconds, tokens)
        failures = f", [red]{failed} failed[/]" if failed else ""
        self._live.update(
            f"{max(seconds, 0):6.1f} s  {ended} of {self._num_requests} requests ended, {sent - ended} in flight"
            f"{failures}, {max(rate, 0):,.0f} output tokens/s",
            refresh=True,
        )


def print_result(console: Console, result: dict[str, Any]) -> None:
    requests = result["requests"]
    server = result["server"]
    label, model = (escape(printable(text)) for text in (result["label"], server["model"]))
    console.print(f"\n[bold]{label}[/]: {model}, seed {result['config']['workload']['seed']}", highlight=False)
    _print_counts(console, requests)
    _print_latencies(console, requests, "requests")
    if streams := result.get("streams"):
        console.print(
            f"{streams['num_requests']} steady streams while requests arrived: "
            f"{streams['output_tokens_per_s']:,.1f} output tokens/s",
            highlight=False,
        )
        _print_latencies(console, streams, "steady streams")
    if good := result.get("goodput"):
        limits = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in good["slo"].items())
        missed = ", ".join(f"{name} {count}" for name, count in good["missed"].items() if count)
        console.print(
            f"goodput: {good['good_requests_per_s']:.3f} requests/s, {good['good_share']:.1%} of "
            f"{good['num_counted']} ({limits}{'; missed: ' + missed if missed else ''})",
            highlight=False,
        )
    client = result["client"]
    ceiling = (
        f"; about {client['chunks_per_cpu_s']:,.0f} chunks/s would fill one"
        if client["cpu_share"] >= _TELLING_CPU_SHARE
        else ""
    )
    console.print(
        f"[dim]client: {_processes(client['num_processes'])} at {client['cpu_share']:.0%} of a core{ceiling}[/]",
        highlight=False,
    )
    for warning in result["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(printable(warning))}", highlight=False)


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes, the busiest"


def _print_counts(console: Console, requests: dict[str, Any]) -> None:
    cached = requests["num_cached_tokens"]
    is_known = cached is not None and requests["num_input_tokens"]
    tiers = "".join(
        f", {count / requests['num_input_tokens']:.0%} from {name.removesuffix('_tokens')}"
        for name, count in requests.get("num_loaded_tokens", {}).items()
        if count and is_known
    )
    share = f" ({cached / requests['num_input_tokens']:.0%} cached{tiers})" if is_known else ""
    warmup = f", {requests['num_warmup']} more to warm up" if requests["num_warmup"] else ""
    console.print(
        f"{requests['num_whole']} of {requests['num_requests']} requests completed in {requests['duration_s']:.2f} s"
        f"{warmup}\n{requests['requests_per_s']:.3f} requests/s, {requests['input_tokens_per_s']:,.1f} input tokens/s"
        f"{share}, {requests['output_tokens_per_s']:,.1f} output tokens/s",
        highlight=False,
    )


def _print_latencies(console: Console, summary: dict[str, Any], title: str) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column(f"{title}, ms")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, words in _ROWS:
        if (figures := summary[name]) is not None:
            table.add_row(words, *(f"{figures[column] * 1e3:,.2f}" for column in _COLUMNS))
    console.print(table)


def print_trials(console: Console, sweep: dict[str, Any]) -> None:
    name = sweep["variable"]
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in (name, "good", "requests/s", "output tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"):
        table.add_column(column, justify="right")
    for trial in sorted(sweep["trials"], key=lambda one: one["value"]):
        requests = trial["result"]["requests"]
        share = trial["good_share"]
        times = [
            f"{requests[measure][column] * 1e3:,.1f}" if requests[measure] else "-"
            for measure in ("ttft", "itl")
            for column in ("p50", "p99")
        ]
        colour = "green" if share >= sweep["good_share"] else "red"
        table.add_row(
            f"{trial['value']:g}",
            f"[{colour}]{share:.1%}[/]",
            f"{requests['requests_per_s']:.2f}",
            f"{requests['output_tokens_per_s']:,.0f}",
            *times,
        )
    console.print(table)
    highest = sweep["highest"]
    found = f"{highest:g}" if highest is not None else f"none from {sweep['low']:g} up"
    if highest is not None and highest == max(trial["value"] for trial in sweep["trials"]):
        found = f"at least {found}, the highest that was tried"
    console.print(f"highest {name} with {sweep['good_share']:.0%} good: [bold]{found}[/]", highlight=False)
