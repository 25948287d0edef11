from pathlib import Path

import torch

from tandem.engine.collectives.choice import open_collectives
from tandem.engine.ranks.group import SINGLE_GROUP
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks


def test_ranks_on_cpus_are_connected() -> None:
    def total(group: ThreadGroup, _: ThreadCollectives) -> float:
        collectives = open_collectives(group, torch.device("cpu"))
        assert collectives is not None
        return collectives.all_reduce(torch.tensor([1.0 + group.ranks.rank])).item()

    assert run_ranks(4, total) == [10.0] * 4


def test_the_end_of_ranks_touches_no_other_file(tmp_path: Path) -> None:
    """The store of the ranks' addresses is opened by its path once more when it is destroyed."""
    names = [tmp_path / str(number) for number in range(40)]

    def connect(group: ThreadGroup, _: ThreadCollectives) -> object:
        return open_collectives(group, torch.device("cpu"))

    collectives = run_ranks(2, connect)
    files = [name.open("wb") for name in names]
    collectives.clear()
    assert [name.stat().st_size for name in names] == [0] * len(names)
    for file in files:
        file.close()


def test_one_rank_needs_none() -> None:
    assert open_collectives(SINGLE_GROUP, torch.device("cpu")) is None
