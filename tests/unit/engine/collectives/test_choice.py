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


def test_one_rank_needs_none() -> None:
    assert open_collectives(SINGLE_GROUP, torch.device("cpu")) is None
