"""A picture of the workers over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.bench.plots import COLOURS, DPI, require_matplotlib

_SIZE = (9, 3.2)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draws each scenario's ready workers by rule. Raises ValueError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["scenario"] for row in rows))
    figure = Figure(figsize=(_SIZE[0], _SIZE[1] * len(names)), layout="constrained")
    for place, name in enumerate(names):
        axes = figure.add_subplot(len(names), 1, place + 1)
        for number, row in enumerate(one for one in rows if one["scenario"] == name and "fixed" not in one["rule"]):
            moments = [count[0] / 60 for count in row["counts"]]
            ready = [count[1] for count in row["counts"]]
            axes.step(moments, ready, where="post", color=COLOURS[number % len(COLOURS)], label=row["rule"])
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("minutes")
        axes.set_ylabel("ready workers")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(file, dpi=DPI)
