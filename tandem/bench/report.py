"""Renders a comparison of runs as one self-contained HTML file."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.bench.plots import figures_of, png, sweep_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1a1a1a; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
.figures { display: grid; gap: 1em; }
.warning { background: #fff6dd; border-left: 4px solid #e0a800; padding: 0.3em 0.8em; margin: 0.3em 0; }
"""
_LATENCIES = (
    ("ttft", "TTFT"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("itl_p95", "ITL p95 of a request"),
    ("itl_max", "longest gap of a request"),
    ("e2e", "E2E"),
)
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_COUNTS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("model", lambda run: str(run["server"]["model"])),
    ("requests whole", lambda run: f"{run['requests']['num_whole']} of {run['requests']['num_requests']}"),
    ("seconds", lambda run: f"{run['requests']['duration_s']:.2f}"),
    ("requests/s", lambda run: f"{run['requests']['requests_per_s']:.3f}"),
    ("input tokens/s", lambda run: f"{run['requests']['input_tokens_per_s']:,.1f}"),
    ("output tokens/s", lambda run: f"{run['requests']['output_tokens_per_s']:,.1f}"),
    ("cached input tokens", lambda run: _count(run["requests"]["num_cached_tokens"])),
    ("good requests", lambda run: f"{run['goodput']['good_share']:.1%}" if "goodput" in run else "-"),
    ("good requests/s", lambda run: f"{run['goodput']['good_requests_per_s']:.3f}" if "goodput" in run else "-"),
    ("longest gap, ms", lambda run: _ms(run["requests"]["longest_gap"])),
    ("client's CPU share", lambda run: f"{run['client']['cpu_share']:.0%}"),
)


def write_report(results: Sequence[dict[str, Any]], file: Path) -> None:
    file.write_text(render(results))


def render(results: Sequence[dict[str, Any]]) -> str:
    parts = ["<h1>tandem bench</h1>", _warnings(results), "<h2>Runs</h2>", _counts(results)]
    for group, title in (("requests", "Latencies"), ("streams", "Steady streams")):
        shown = [result for result in results if group in result]
        if shown:
            parts += [f"<h2>{title}, ms</h2>", _latencies(shown, group)]
    parts += ["<h2>Plots</h2>", '<div class="figures">']
    parts += [_image(figure, name) for name, figure in figures_of(results).items()]
    parts.append("</div>")
    for result in results:
        if sweep := result.get("sweep"):
            parts += [f"<h2>Sweep of {escape(result['label'])}</h2>", _image(sweep_figure(sweep), "sweep")]
    parts += ["<h2>Settings</h2>", _settings(results)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>tandem bench</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _warnings(results: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f'<div class="warning">{escape(result["label"])}: {escape(warning)}</div>'
        for result in results
        for warning in result["warnings"]
    )


def _counts(results: Sequence[dict[str, Any]]) -> str:
    return _table(["", *(result["label"] for result in results)], [
        [name, *(value(result) for result in results)] for name, value in _COUNTS
    ])  # fmt: skip


def _latencies(results: Sequence[dict[str, Any]], group: str) -> str:
    rows = []
    for name, title in _LATENCIES:
        for result in results:
            figures = result[group][name]
            if figures is not None:
                rows.append([title, result["label"], *(_ms(figures[column]) for column in _COLUMNS)])
    return _table(["", "run", *_COLUMNS], rows)


def _settings(results: Sequence[dict[str, Any]]) -> str:
    """Return a row per setting, differing ones first."""
    flat = [dict(_flatten(result["config"])) for result in results]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    names.sort(key=lambda name: len({settings.get(name) for settings in flat}) == 1)
    rows = [[name, *(settings.get(name, "") for settings in flat)] for name in names]
    return _table(["", *(result["label"] for result in results)], rows)


def _flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flatten(inner, f"{name}.{key}" if name else key)]
    return [(name, str(value))]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _image(figure: "Figure", name: str) -> str:
    data = b64encode(png(figure)).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"
