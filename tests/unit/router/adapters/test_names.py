"""Names of adapters at a router."""

from typing import Any

from tandem.adapters import AdapterEntry
from tandem.router.adapters.metrics import adapter_metrics
from tandem.router.adapters.names import AdapterNames
from tests.fakes.scripted_adapters import make_ref


def make_names(now_ns: int = 100) -> tuple[AdapterNames, list[AdapterEntry]]:
    names, told = AdapterNames("r0", [AdapterEntry("static", 0, "", make_ref("s"))], lambda: now_ns), []
    names.subscribe(told.extend)
    return names, told


def test_a_change_by_any_router_wins_over_the_command_line() -> None:
    names, told = make_names()
    assert names.find("static") == make_ref("s") and not names.is_complete
    gone = AdapterEntry("static", 5, "r1")
    names.merge([gone])
    assert names.find("static") is None and names.is_complete and told == [gone]


def test_only_news_is_told() -> None:
    names, told = make_names()
    names.change("a", make_ref("one"))
    names.merge(names.entries())
    assert [entry.name for entry in told] == ["a"]


def test_metrics_end_with_the_unload() -> None:
    names, _ = make_names()
    names.change("a", make_ref("one"))
    names.count_ended("a", "finished")
    names.count_ended("unknown", "finished")

    def samples() -> list[tuple[Any, ...]]:
        families = adapter_metrics(names, ())
        return [(s.name, s.labels.get("adapter"), s.value) for family in families for s in family.samples]

    assert ("tandem_adapter_requests_total", "a", 1) in samples() and ("tandem_adapters_loaded", None, 2) in samples()
    names.change("a", None)
    assert {name for _, name, _ in samples()} == {None, "static"} and not names.num_ended
