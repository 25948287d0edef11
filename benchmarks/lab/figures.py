"""The report's plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lab.findings import PHASE_WORDS, shares
from benchmarks.lab.starts import JOINING, LAUNCHER, PROCESSES, RAY, REST
from tandem.bench.plots import COLOURS, distribution_figure, gaps_figure, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MORE_COLOURS = (*COLOURS, "#999999", "#f0e442", "#444444", "#88ccee", "#aa4499")
_STAGE_ORDER = (LAUNCHER, RAY, PROCESSES)


def write_figures(results: dict[str, Any], directory: Path) -> list[str]:
    """Names of the PNG files that were written, of what the results have. Raises OSError."""
    figures: dict[str, Figure | None] = {}
    runs = [one["result"] for one in results["burst"].values()]
    if runs:
        figures["burst-ttft"] = distribution_figure(runs, "ttft", "TTFT of the burst's prompts")
        figures["burst-itl"] = gaps_figure(runs)
        phases = {one["result"]["label"]: one["phases_ms"] for one in results["burst"].values()}
        figures["burst-phases"] = phases_figure(phases)
    if results["concurrency"]:
        figures["concurrency-phases"] = phases_figure(
            {
                one["result"]["label"]: one["phases_ms"]
                for measured in results["concurrency"].values()
                for one in measured.values()
            }
        )
    if results["cache"]:
        figures["cache-ttft"] = cache_figure(results["cache"]["steps"])
    stages = {name: start["stages"] for name, start in results["starts"].items() if start["stages"]}
    if stages:
        figures["starts"] = stacked_figure(stages, _ordered(stages), "seconds")
    written = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in written.items():
        (directory / f"{name}.png").write_bytes(png(figure))
    return list(written)


def phases_figure(phases_ms: Mapping[str, Mapping[str, float]]) -> "Figure":
    """Where a request's time goes, one bar for each run. Args: phases_ms: by the run's label."""
    parts = {
        label: {PHASE_WORDS[name]: share * phases["e2e"] for name, share in shares(phases).items()}
        for label, phases in phases_ms.items()
    }
    return stacked_figure(parts, list(PHASE_WORDS.values()), "ms, mean of a request")


def cache_figure(steps: Mapping[str, Any]) -> "Figure":
    """The TTFT of each step: median, with a line from the shortest to the longest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.0), layout="constrained")
    axes = figure.add_subplot()
    ttfts = [step["result"]["requests"]["ttft"] for step in steps.values()]
    medians = [ttft["p50"] * 1e3 for ttft in ttfts]
    below = [(ttft["p50"] - ttft["min"]) * 1e3 for ttft in ttfts]
    above = [(ttft["max"] - ttft["p50"]) * 1e3 for ttft in ttfts]
    axes.bar(list(steps), medians, color=COLOURS[0], yerr=[below, above], capsize=3, ecolor="#444444")
    axes.set_ylabel("TTFT, ms: median, least to most")
    axes.grid(axis="y", alpha=0.25)
    return figure


def stacked_figure(bars: Mapping[str, Mapping[str, float]], parts: Sequence[str], unit: str) -> "Figure":
    """Horizontal bars, each of which is put together of parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 1.4 + 0.42 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    labels = [label.replace("`", "") for label in bars]
    left = [0.0] * len(bars)
    for number, part in enumerate(parts):
        lengths = [of_bar.get(part, 0.0) for of_bar in bars.values()]
        if any(lengths):
            axes.barh(labels, lengths, left=left, label=part, color=_MORE_COLOURS[number % len(_MORE_COLOURS)])
        left = [one + other for one, other in zip(left, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.25)
    figure.legend(fontsize=8, loc="outside upper center", ncols=4)
    return figure


def _ordered(stages: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Names of all stages, in the order in which they come."""
    engine = [name for one in stages.values() for name in one if name not in (*_STAGE_ORDER, REST, JOINING)]
    return list(dict.fromkeys([*_STAGE_ORDER, *engine, REST, JOINING]))
