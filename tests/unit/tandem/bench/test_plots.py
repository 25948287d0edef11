"""Plots of runs."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the extra `bench` has it")

from tandem.bench.plots import figures_of, gaps_figure, png, require_matplotlib, write_plots
from tandem.bench.results import make_result
from tests.unit.tandem.bench.records import record
from tests.unit.tandem.bench.test_results import a_run

PNG = b"\x89PNG\r\n\x1a\n"


def test_available_measures_are_drawn(tmp_path: Path) -> None:
    results = [make_result(*a_run(label="one")), make_result(*a_run(label="two"))]
    write_plots(results, tmp_path / "plots")
    names = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert names == {"ttft", "tpot", "itl", "itl_p95", "e2e", "itl_over_time"}
    assert all(path.read_bytes().startswith(PNG) for path in (tmp_path / "plots").iterdir())


def test_curves_match_the_values() -> None:
    [axes] = figures_of([make_result(*a_run(label="one"))])["ttft"].axes
    [line] = axes.get_lines()
    assert line.get_label() == "one"
    xs = np.asarray(line.get_xdata())
    assert xs.min() == pytest.approx(500) and xs.max() == pytest.approx(2000)


@pytest.mark.parametrize("stalls", [(0.9, 0.1), (0.1, 0.9)])
def test_streams_of_two_runs_are_on_one_scale_with_the_arrivals(stalls: tuple[float, float]) -> None:
    results = []
    for label, stall in zip(("one", "two"), stalls, strict=True):
        stream = record([0.1, 0.2, 0.2 + stall, 0.3 + stall], group="streams", error="cut")
        results.append(make_result(*a_run(label=label, records=[record([1.3], due_s=0.25), stream])))
    figure = gaps_figure(results)
    assert figure is not None
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim() and first.get_ylim()[1] > 900
    assert first.get_title(loc="left").startswith("one: steady streams - ITL p50 ")
    stalled = first if stalls[0] > 0.5 else second
    lines = {line.get_label(): np.asarray(line.get_ydata()).max() for line in stalled.get_lines()}
    assert lines["median gap"] == lines["99 of 100 are shorter"] == pytest.approx(900)
    assert any(line.get_label() == "a prompt arrives" for line in first.get_lines())
    assert png(figure).startswith(PNG)


def test_no_values_draw_nothing() -> None:
    empty = make_result(*a_run(records=[record([], error="refused")]))
    assert gaps_figure([empty]) is None and set(figures_of([empty])) == set()


def test_missing_matplotlib_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"need matplotlib: pip install 'tandem-llm\[bench\]'"):
        require_matplotlib()
