"""Writes the table of docs/clients.md: what the last run of each client tried, and what passed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.clients.table import NAMES

PAGE = Path(__file__).parents[2] / "docs/clients.md"
HEAD = ["| client | version | settings | what passed |", "|---|---|---|---|"]
_TABLE = re.compile(r"(?<=<!-- clients -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    version: str
    settings: str
    passed: tuple[str, ...]

    def __str__(self) -> str:
        return f"| {self.name} | {self.version} | {self.settings} | {'; '.join(self.passed)} |"


def rows_of(page: str) -> dict[str, str]:
    """Return the lines of the table's rows by client."""
    [table] = _TABLE.findall(page)
    return {line.split("|")[1].strip(): line for line in table.splitlines()[len(HEAD) :]}


def with_rows(page: str, rows: Iterable[Row]) -> str:
    """Replace the rows of these clients, and drop those of clients that are no longer tested."""
    lines = {**rows_of(page), **{row.name: str(row) for row in rows}}
    table = "\n".join([*HEAD, *(lines[name] for name in NAMES if name in lines)])
    return _TABLE.sub(lambda _: f"{table}\n", page)
