"""Results of a benchmark and their aims, as a table, as JSON and as an exit status."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """Attributes: low, high: bounds of the aim, or None."""

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    @property
    def ok(self) -> bool:
        return (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)

    @property
    def aim(self) -> str:
        limits = (("at least", self.low), ("at most", self.high))
        return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table("what", title=title)
    for column in ("value", "aim", "ok"):
        table.add_column(column, justify="right")
    for row in rows:
        ok = ("yes" if row.ok else "no") if row.aim else ""
        table.add_row(row.name, f"{row.value:,.3f} {row.unit}", row.aim, ok)
    return table


def row_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"ok": row.ok}


def report(rows: Sequence[Row], title: str, json_file: Path | None) -> int:
    """Print the results and write them to `json_file`; return 0 if every aim is met, 1 otherwise."""
    Console().print(table_of(rows, title))
    if json_file:
        json_file.write_text(json.dumps([row_json(row) for row in rows], indent=2) + "\n")
    return 0 if all(row.ok for row in rows) else 1
