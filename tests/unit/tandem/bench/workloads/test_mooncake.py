"""Times, lengths and common blocks of a replayed Mooncake trace."""

import json
from pathlib import Path

import pytest

from tandem.bench.workloads.base import PromptPart, Session
from tandem.bench.workloads.mooncake import BLOCK_TOKENS, Mooncake
from tandem.bench.workloads.prompts import PromptAs, PromptMaker

TRACE = (
    {"timestamp": 27000, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 30000, "input_length": 1024, "output_length": 26, "hash_ids": [46, 47]},
    {"timestamp": 30500, "input_length": 700, "output_length": 0, "hash_ids": [46]},
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in TRACE))
    return path


def tokens(session: Session) -> list[object]:
    """Return the prompt's ids or words."""
    parts: tuple[PromptPart, ...] = session.turns[0].parts
    return [token for part in parts for token in (part.token_ids if part.token_ids is not None else part.text.split())]


@pytest.mark.parametrize("prompt_as", ["ids", "text"])
def test_equal_hash_ids_are_equal_blocks(file: Path, prompt_as: PromptAs) -> None:
    sessions = Mooncake(PromptMaker(0, prompt_as), file).sessions()
    prompts = [tokens(session) for session in sessions]
    assert [len(prompt) for prompt in prompts] == [1300, 1024, 700]
    assert prompts[0][:1024] == prompts[1]
    assert prompts[2][:BLOCK_TOKENS] == prompts[0][:BLOCK_TOKENS]
    # Tokens beyond the blocks are unique.
    assert prompts[2][BLOCK_TOKENS:] != prompts[0][BLOCK_TOKENS:700]
    assert [session.turns[0].num_output_tokens for session in sessions] == [52, 26, 1]


def test_times_count_from_the_first_and_are_scaled(file: Path) -> None:
    sessions = Mooncake(PromptMaker(0, "ids"), file, time_scale=0.5).sessions()
    assert [session.due_s for session in sessions] == [0.0, 1.5, 1.75]
    assert len(Mooncake(PromptMaker(0, "ids"), file, limit=2).sessions()) == 2


@pytest.mark.parametrize("line", ["{", '{"timestamp": 1}', "[1]", '{"timestamp": "x", "input_length": 1}'])
def test_a_bad_line_is_named(file: Path, line: str) -> None:
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"line 4 is not of a Mooncake trace"):
        Mooncake(PromptMaker(0, "ids"), file).sessions()


def test_missing_or_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Mooncake(PromptMaker(0, "ids"), tmp_path / "absent").sessions()
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="has no requests"):
        Mooncake(PromptMaker(0, "ids"), tmp_path / "empty").sessions()


def test_unsorted_trace_is_sorted(tmp_path: Path) -> None:
    """No request is due before the start."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in reversed(TRACE)))
    sessions = Mooncake(PromptMaker(0, "ids"), path).sessions()
    assert [session.due_s for session in sessions] == [0.0, 3.0, 3.5]
    assert [session.turns[0].num_output_tokens for session in sessions] == [52, 26, 1]
    assert [session.index for session in sessions] == [0, 1, 2]


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 0, "input_length": 1e999, "output_length": 2}',
        '{"timestamp": 0, "input_length": 1000000000000, "output_length": 2}',
        '{"timestamp": 0, "input_length": 3, "output_length": -2}',
        '{"timestamp": NaN, "input_length": 3, "output_length": 2}',
        '{"timestamp": 1e999, "input_length": 3, "output_length": 2}',
        '{"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": "12"}',
        "\udcff",
    ],
)
def test_unsendable_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n", errors="surrogateescape")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 1 is not of a Mooncake trace"):
        Mooncake(PromptMaker(0, "ids"), path).sessions()
