"""docs/bad-input.md says what the tests have seen."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.bad_input import ROWS, SHOWN_APART, Row

PAGE = Path(__file__).parents[3] / "docs/bad-input.md"
TESTED = {row.name: row for row in (*ROWS, *SHOWN_APART.values())}


class Documented(NamedTuple):
    name: str
    grpc: str
    http: str
    message: str


def documented() -> list[Documented]:
    """The rows of the tables of four columns: those about the two wires."""
    # A bar within a message is escaped.
    cells = [
        [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    return [Documented(*row) for row in cells if len(row) == 4 and row[0] != "input"]


def as_documented(row: Row) -> Documented:
    message = f"`{row.message}`"
    if row.http_message:
        message += f", over HTTP `{row.http_message}`"
    grpc = "–" if row.grpc is None else f"`{row.grpc_code}`"
    http = "–" if row.http is None else str(row.status)
    return Documented(row.name, grpc, http, message)


def test_every_tested_input_is_documented_once_and_no_other() -> None:
    names = [row.name for row in documented()]
    assert len(TESTED) == len(ROWS) + len(SHOWN_APART), "two rows have the same name"
    assert sorted(names) == sorted(TESTED)


@pytest.mark.parametrize("row", TESTED.values(), ids=lambda row: row.name)
def test_documented_answers_are_the_tested_ones(row: Row) -> None:
    assert as_documented(row) in documented()
