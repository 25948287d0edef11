"""The terminal shows the result's figures."""

from io import StringIO

from rich.console import Console

from tandem.bench.results import make_result
from tandem.bench.runner import Progress
from tandem.bench.terminal import LiveProgress, print_result, print_trials
from tests.unit.tandem.bench.records import record
from tests.unit.tandem.bench.test_results import a_run


def console(*, is_terminal: bool = False) -> tuple[Console, StringIO]:
    shown = StringIO()
    return Console(file=shown, width=200, force_terminal=is_terminal, color_system=None), shown


def test_the_table_has_each_measure_in_milliseconds() -> None:
    target, shown = console()
    print_result(target, make_result(*a_run(label="mine")))
    lines = {line.split("  ")[0].strip(): line for line in shown.getvalue().splitlines()}
    assert lines["TTFT"].split()[1:] == ["1,250.00", "1,250.00", "1,850.00", "1,925.00", "1,985.00", "2,000.00"]
    assert lines["ITL"].split()[-1] == "200.00"
    assert "mine: m" in shown.getvalue()
    assert "2 of 2 requests completed in 2.10 s" in shown.getvalue()
    assert "50.0% of 2 (ttft 1000 ms; missed: ttft 1)" in shown.getvalue()


def test_streams_table_omits_missing_measures() -> None:
    target, shown = console()
    stream = record([0.1, 0.2, 0.4], group="streams", error="cut")
    print_result(target, make_result(*a_run(records=[record([0.3, 0.5]), stream])))
    of_streams = shown.getvalue().partition("steady streams, ms")[2]
    assert "ITL" in of_streams and "TTFT" not in of_streams


def test_a_sweep_is_a_table_of_its_runs() -> None:
    target, shown = console()
    result = make_result(*a_run())
    trials = [{"value": value, "good_share": share, "result": result} for value, share in ((4.0, 0.5), (2.0, 1.0))]
    print_trials(target, {"variable": "rate", "low": 2.0, "good_share": 0.9, "highest": 2.0, "trials": trials})
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert rows[1][:2] == ["2", "100.0%"] and rows[2][:2] == ["4", "50.0%"]
    assert "highest rate with 90% good: 2" in shown.getvalue()


def test_progress_is_shown_on_a_terminal_alone() -> None:
    for is_terminal in (True, False):
        target, shown = console(is_terminal=is_terminal)
        with LiveProgress(target, 50) as live:
            live.show(2.0, [Progress(10, 8, 1, 500), Progress(5, 4, 0, 100)])
        assert ("12 of 50 requests ended, 3 in flight, 1 failed" in shown.getvalue()) is is_terminal


def test_sweep_with_good_maximum_gives_a_lower_bound() -> None:
    target, shown = console()
    trials = [{"value": float(value), "good_share": 1.0, "result": make_result(*a_run())} for value in (1, 2)]
    print_trials(target, {"variable": "rate", "low": 1.0, "good_share": 0.9, "highest": 2.0, "trials": trials})
    assert "at least 2, the highest that was tried" in shown.getvalue()


def test_cached_tokens_of_the_page_store_are_shown_by_tier() -> None:
    target, shown = console()
    result = make_result(*a_run())
    counts = {
        "num_input_tokens": 100,
        "num_cached_tokens": 80,
        "num_loaded_tokens": {"host_tokens": 50, "disk_tokens": 0},
    }
    result["requests"] |= counts
    print_result(target, result)
    assert "(80% cached, 50% from host)" in " ".join(shown.getvalue().split())


def test_unknown_cached_tokens_are_not_shown_as_zero() -> None:
    target, shown = console()
    print_result(target, make_result(*a_run()))
    assert "cached" not in shown.getvalue()
    assert "would fill one" not in shown.getvalue()
