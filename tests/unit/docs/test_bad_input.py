"""docs/bad-input.md says what the tests have seen."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.bad_input import ROWS, SHOWN_APART, Row

PAGE = Path(__file__).parents[3] / "docs/bad-input.md"
TESTED = {row.name: row for row in (*ROWS, *SHOWN_APART.values())}
# The gRPC status and the HTTP status of all rows in a table without columns for them, by the head of its first column.
STATUSES = {"input over gRPC or HTTP": ("`INVALID_ARGUMENT`", "400"), "input over HTTP": ("–", "400")}


class Documented(NamedTuple):
    name: str
    grpc: str
    http: str
    message: str


def documented() -> list[Documented]:
    """Return the rows of all tables about the two wires."""
    rows = []
    statuses: tuple[str, str] | None = None
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| "):
            continue
        # A bar within a message is escaped.
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[0].startswith("input"):
            statuses = STATUSES.get(cells[0])
        elif statuses is not None:
            rows.append(Documented(cells[0], *statuses, cells[1]))
        elif len(cells) == 4:
            rows.append(Documented(*cells))
    return rows


def documented_name(row: Row) -> str:
    """Return the first column; one row of the page stands for all lone surrogates."""
    return re.sub("^half a character in .*", "half a character in any field", row.name)


def as_documented(row: Row) -> Documented:
    message = f"`{row.message}`"
    if row.http_message:
        message += f", over HTTP `{row.http_message}`"
    grpc = "–" if row.grpc is None else f"`{row.grpc_code}`"
    http = "–" if row.http is None else str(row.status)
    return Documented(documented_name(row), grpc, http, message)


def test_every_tested_input_is_documented_once_and_no_other() -> None:
    names = [row.name for row in documented()]
    assert len(TESTED) == len(ROWS) + len(SHOWN_APART), "two rows have the same name"
    assert sorted(names) == sorted({documented_name(row) for row in TESTED.values()})


@pytest.mark.parametrize("row", TESTED.values(), ids=lambda row: row.name)
def test_documented_answers_are_the_tested_ones(row: Row) -> None:
    assert as_documented(row) in documented()
