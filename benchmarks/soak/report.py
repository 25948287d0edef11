"""The soak's tables, its record as JSON, and whether it passed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.soak.samples import Life
from benchmarks.soak.traffic import Tally
from benchmarks.soak.verdict import Growth


@dataclass(frozen=True)
class Outcome:
    """All that a soak found.

    Attributes:
        faults: by kind.
        troubles: what the cluster failed to do; each fails the soak.
        remarks: what a reader should know.
        host: the first and the last value by name.
    """

    minutes: float
    tally: Tally
    growths: Sequence[Growth]
    faults: Mapping[str, int]
    troubles: Sequence[str]
    remarks: Sequence[str]
    host: Mapping[str, tuple[float, float]]

    def with_trouble(self, line: str) -> "Outcome":
        return replace(self, troubles=[*self.troubles, line])

    @property
    def leaks(self) -> list[str]:
        return [f"{g.kind}: {g.value}" for g in self.growths if not g.is_flat]

    @property
    def has_passed(self) -> bool:
        return self.tally.is_clean and self.tally.num_checked > 0 and not self.leaks and not self.troubles

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "leaks": self.leaks, "passed": self.has_passed}


def show(console: Console, outcome: Outcome) -> None:
    console.print(_processes(outcome.growths))
    console.print(_host(outcome.host))
    console.print(_requests(outcome.tally))
    print_counts(console, "Sent again by the client", outcome.tally.sent_again)
    print_counts(console, "Failed", outcome.tally.failures)
    print_counts(console, "Faults", outcome.faults)
    for title, lines in (
        ("Mismatches and failures", outcome.tally.notes),
        ("Troubles", outcome.troubles),
        ("Leaks", outcome.leaks),
        ("Remarks", outcome.remarks),
    ):
        for line in lines:
            console.print(f"{title}: {line}", markup=False, soft_wrap=True)
    result = "passed" if outcome.has_passed else "FAILED"
    console.print(f"Soak of {outcome.minutes:g} min {result}: {outcome.tally.num_checked} streams checked")


def print_counts(console: Console, title: str, counts: Mapping[str, int]) -> None:
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        console.print(f"{title}: {count} x {name}", markup=False, soft_wrap=True)


def _processes(growths: Sequence[Growth]) -> Table:
    table = Table(title="Growth per hour, by kind of process, with its 95 % interval")
    for column in ("process", "value"):
        table.add_column(column)
    for column in ("lives", "last", "slope/h", "interval", "bound", "resolution", ""):
        table.add_column(column, justify="right")
    for growth in growths:
        slope = growth.slope
        bound = "" if growth.bound is None else f"{growth.bound:g}"
        if slope is None:
            cells = ("0", f"{growth.last:,.1f}", "", "", bound, "", "too short")
        else:
            cells = (
                str(slope.num_lives),
                f"{growth.last:,.1f}",
                f"{slope.per_hour:+,.2f}",
                f"{slope.low:+,.2f} to {slope.high:+,.2f}",
                bound,
                "" if growth.resolution is None else f"{growth.resolution:.1f}",
                "" if growth.bound is None else "flat" if growth.is_flat else "GROWS",
            )
        table.add_row(growth.kind, growth.value, *cells)
    return table


def _host(host: Mapping[str, tuple[float, float]]) -> Table:
    table = Table("what", title="The cluster on its host")
    for column in ("first", "last"):
        table.add_column(column, justify="right")
    for name, (first, last) in host.items():
        table.add_row(name, f"{first:,.1f}", f"{last:,.1f}")
    return table


def _requests(tally: Tally) -> Table:
    table = Table("requests", title="Every answer, compared with the first one")
    for column in ("right", "ties", "wrong", "failed"):
        table.add_column(column, justify="right")
    for name, counts in tally.kinds.items():
        table.add_row(name, str(counts.num_right), str(counts.num_ties), str(counts.num_wrong), str(counts.num_failed))
    return table


def first_and_last(host: Life) -> dict[str, tuple[float, float]]:
    return {name: (values[0], values[-1]) for name, values in host.values.items() if values}
