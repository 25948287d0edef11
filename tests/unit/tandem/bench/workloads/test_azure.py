"""Times and lengths of a replayed Azure trace."""

from pathlib import Path

import pytest

from tandem.bench.workloads.azure import Azure
from tandem.bench.workloads.prompts import PromptMaker

TRACE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""


def read(directory: Path, text: str, **options: float) -> list[tuple[float | None, int, int]]:
    file = directory / "trace.csv"
    file.write_text(text)
    sessions = Azure(PromptMaker(0, "ids"), file, **options).sessions()  # type: ignore[arg-type]
    return [(s.due_s, s.turns[0].parts[0].num_tokens, s.turns[0].num_output_tokens) for s in sessions]


def test_times_and_lengths_are_the_traces(tmp_path: Path) -> None:
    found = read(tmp_path, TRACE, time_scale=2.0)
    assert [entry[1:] for entry in found] == [(4808, 10), (3180, 8), (110, 27)]
    assert [entry[0] for entry in found] == pytest.approx([0.0, 0.104, 120.0])
    assert len(read(tmp_path, TRACE, limit=1)) == 1


def test_newer_traces_have_a_time_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    assert read(tmp_path, text) == [(0.0, 2162, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (TRACE + "yesterday,1,2\n", "line 5 is not of an Azure trace"),
        (TRACE + "2023-11-16 18:18:04,many,2\n", "line 5 is not of an Azure trace"),
        (TRACE.splitlines()[0] + "\n", "has no requests"),
    ],
)
def test_malformed_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_unsorted_trace_is_sorted(tmp_path: Path) -> None:
    """No request is due before the start."""
    head, *rows = TRACE.splitlines(keepends=True)
    assert read(tmp_path, head + rows[2] + rows[0] + rows[1]) == read(tmp_path, TRACE)


@pytest.mark.parametrize("row", ["2023-11-16 18:17:03,5,-1", "2023-11-16 18:17:03,99999999999,1", '"' + "x" * 200_000])
def test_unsendable_row_is_named(tmp_path: Path, row: str) -> None:
    with pytest.raises(ValueError, match=r"trace\.csv.* is not"):
        read(tmp_path, TRACE.splitlines()[0] + "\n" + row + "\n")
