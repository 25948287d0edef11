"""The benchmark of layouts: equal load for each, new prompts in each cell."""

import argparse

import pytest

from benchmarks.goodput import Cell, bench_config

ARGUMENTS = argparse.Namespace(seconds=15.0, processes=2, vocab_size=8000)


def test_cells_name_lengths_and_rate() -> None:
    assert Cell.parse("4096x256@10.5") == Cell(4096, 256, 10.5)
    assert str(Cell.parse("4096x256@10")) == "4096x256@10"
    for wrong in ("4096x256", "4096x256@0", "x256@1"):
        with pytest.raises(ValueError, match="PROMPTxOUTPUT@RATE"):
            Cell.parse(wrong)


def test_every_layout_gets_the_same_prompts_and_no_cell_those_of_another() -> None:
    cells = Cell(64, 8, 1), Cell(64, 8, 2)
    configs = [bench_config("a:1", cell, ARGUMENTS, warm) for cell in cells for warm in (False, True)]
    again = [bench_config("b:2", cell, ARGUMENTS, warm) for cell in cells for warm in (False, True)]
    assert [config.workload for config in configs] == [config.workload for config in again]
    assert len({config.workload.seed for config in configs}) == 4
