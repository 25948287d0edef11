"""Plots of runs, from their results alone."""

import importlib.util
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.bench.clients.table import INSTALL
from tandem.bench.measures import CURVE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
# Inches.
_SIZE = (9, 5)
DISTRIBUTIONS = (
    ("ttft", "TTFT"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("itl_p95", "ITL p95 of a request"),
    ("e2e", "E2E"),
)
# Distinguishable without color vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"plots and reports need matplotlib: {INSTALL}")


def distribution_figure(results: Sequence[dict[str, Any]], measure: str, title: str) -> "Figure | None":
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    num_lines = 0
    for number, result in enumerate(results):
        for group, style in (("requests", "-"), ("streams", "--")):
            figures = (result.get(group) or {}).get(measure)
            if figures is None:
                continue
            name = result["label"] + (" (steady streams)" if group == "streams" else "")
            times = [value * 1e3 for value in figures["curve"]]
            axes.plot(times, CURVE, style, color=COLOURS[number % len(COLOURS)], label=name)
            num_lines += 1
    if not num_lines:
        return None
    axes.set_xlabel(f"{title}, ms")
    axes.set_ylabel("% of values up to it")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 100.5)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return figure


def gaps_figure(results: Sequence[dict[str, Any]]) -> "Figure | None":
    """Plot gaps over time, of steady streams or else of requests, with marks at arrivals; None without gaps."""
    from matplotlib.figure import Figure

    shown = [result for result in results if result["series"]["itl"] is not None]
    if not shown:
        return None
    figure = Figure(figsize=(12, 1.4 + 3.0 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for number, (result, axes) in enumerate(zip(shown, panels, strict=True)):
        _draw_gaps(axes, result, COLOURS[number % len(COLOURS)])
    longest = max(max(result["series"]["itl"]["max"]) for result in shown)
    panels[0].set_ylim(0, 1.05e3 * longest or 1)
    panels[-1].set_xlabel("seconds since the run began")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside upper right", ncols=4)
    return figure


def _draw_gaps(axes: "Axes", result: dict[str, Any], colour: str) -> None:
    series = result["series"]
    gaps, at_s = series["itl"], series["itl"]["at_s"]
    has_streams = "streams" in result
    if has_streams:
        # Without streams, marks would be everywhere.
        for number, moment in enumerate(series["arrivals_s"]):
            label = "a prompt arrives" if number == 0 else None
            axes.axvline(moment, ymax=0.06, color="#444444", linewidth=0.8, label=label)
    longest, high, median = ([value * 1e3 for value in gaps[name]] for name in ("max", "p99", "p50"))
    axes.fill_between(at_s, 0, longest, step="mid", color=colour, alpha=0.25, linewidth=0, label="longest gap")
    axes.plot(at_s, high, color=colour, linewidth=0.8, alpha=0.8, drawstyle="steps-mid", label="99 of 100 are shorter")
    axes.plot(at_s, median, color="#222222", linewidth=1.1, drawstyle="steps-mid", label="median gap")
    axes.set_ylabel("ITL, ms")
    itl = (result.get("streams") or result["requests"])["itl"]
    in_all = f" - ITL p50 {itl['p50'] * 1e3:.1f} ms, p99 {itl['p99'] * 1e3:.1f} ms" if itl else ""
    axes.set_title(result["label"] + (": steady streams" if has_streams else "") + in_all, fontsize=10, loc="left")
    axes.grid(alpha=0.25)


def sweep_figure(sweep: dict[str, Any]) -> "Figure":
    from matplotlib.figure import Figure

    trials = sorted(sweep["trials"], key=lambda one: one["value"])
    values = [trial["value"] for trial in trials]
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(values, [100 * trial["good_share"] for trial in trials], "o-", color=COLOURS[0], label="good requests")
    axes.axhline(100 * sweep["good_share"], color="#444444", linewidth=0.8, linestyle=":")
    axes.set_xlabel("requests/s" if sweep["variable"] == "rate" else "requests in flight")
    axes.set_ylabel("% good")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.25)
    rates = axes.twinx()
    tokens = [trial["result"]["requests"]["output_tokens_per_s"] for trial in trials]
    rates.plot(values, tokens, "s--", color=COLOURS[1], label="output tokens/s")
    rates.set_ylabel("output tokens/s")
    rates.set_ylim(bottom=0)
    figure.legend(fontsize=8, loc="outside upper center", ncols=2)
    return figure


def figures_of(results: Sequence[dict[str, Any]]) -> dict[str, "Figure"]:
    figures = {name: distribution_figure(results, name, title) for name, title in DISTRIBUTIONS} | {
        "itl_over_time": gaps_figure(results)
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def png(figure: "Figure") -> bytes:
    target = BytesIO()
    figure.savefig(target, format="png", dpi=DPI)
    return target.getvalue()


def write_plots(results: Sequence[dict[str, Any]], directory: Path) -> None:
    """Write a PNG file per plot. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in figures_of(results).items():
        (directory / f"{name}.png").write_bytes(png(figure))
