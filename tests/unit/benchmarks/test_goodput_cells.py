"""Loads of the goodput benchmark: equal for all layouts, with new prompts in each cell."""

import argparse
from itertools import pairwise

import pytest

from benchmarks.goodput_cells import Cell, bench_config, fill_config
from tandem.bench.workloads.base import Session
from tandem.bench.workloads.table import make_sessions

ARGUMENTS = argparse.Namespace(seconds=15.0, processes=2, vocab_size=8000)
CONVERSATIONS = Cell(20, 10, 4.0, document_tokens=100, num_turns=3, working_set=2.5)


def test_cells_name_lengths_and_rate() -> None:
    assert Cell.parse("4096x256@10.5") == Cell(4096, 256, 10.5)
    assert Cell.parse("100+20x10x3@4/2.5") == CONVERSATIONS
    for text in ("4096x256@10", "100+20x10@4", "100+20x10x3@4/2.5", "20x10x3@4/0.8"):
        assert str(Cell.parse(text)) == text


@pytest.mark.parametrize("wrong", ["4096x256", "4096x256@0", "x256@1", "8x8@1/3", "8x8x2@1", "8x8x0@1/2", "8x8x2@1/0"])
def test_other_texts_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="PROMPTxOUTPUT@RATE"):
        Cell.parse(wrong)


def test_every_layout_gets_the_same_prompts_and_no_cell_those_of_another() -> None:
    cells = Cell(64, 8, 1), Cell(64, 8, 2)
    configs = [bench_config("a:1", cell, ARGUMENTS, warm) for cell in cells for warm in (False, True)]
    again = [bench_config("b:2", cell, ARGUMENTS, warm) for cell in cells for warm in (False, True)]
    assert [config.workload for config in configs] == [config.workload for config in again]
    assert len({config.workload.seed for config in configs}) == 4


def conversations(pool_tokens: int) -> list[Session]:
    config = bench_config("a:1", CONVERSATIONS, ARGUMENTS, is_warmup=False, pool_tokens=pool_tokens)
    return make_sessions(config.workload, config.arrivals, config.duration_s)


def test_conversations_are_a_multiple_of_the_pool() -> None:
    sessions = conversations(10_000)
    tokens = sum(
        sum(part.num_tokens for turn in session.turns for part in turn.parts)
        + sum(turn.num_output_tokens for turn in session.turns)
        for session in sessions
    )
    assert tokens == pytest.approx(2.5 * 10_000, rel=0.02)


def test_all_other_conversations_have_a_turn_between_two_of_one() -> None:
    sessions = conversations(10_000)
    arrivals = [session.due_s or 0.0 for session in sessions]
    assert all(before < after for before, after in pairwise(arrivals))
    # Arrivals of the first turns take as long as the pause before the second, on average.
    assert all(turn.think_s == len(sessions) / 4.0 for session in sessions for turn in session.turns[1:])
    assert arrivals[-1] == pytest.approx(len(sessions) / 4.0, rel=0.2)


def test_the_first_prompts_of_all_conversations_are_computed_before() -> None:
    config = bench_config("a:1", CONVERSATIONS, ARGUMENTS, is_warmup=False, pool_tokens=10_000)
    fill = fill_config(config)
    before = make_sessions(fill.workload, fill.arrivals, fill.duration_s)
    measured = make_sessions(config.workload, config.arrivals, config.duration_s)
    assert [session.turns[0].parts for session in before] == [session.turns[0].parts for session in measured]
    assert {len(session.turns) for session in before} == {1}
    assert fill.arrivals is not None and fill.arrivals.kind == "closed"
