import pytest

from tandem.engine.ranks.group import SINGLE_GROUP
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks


def test_all_ranks_get_the_same_decisions() -> None:
    def agree(group: ThreadGroup, _: ThreadCollectives) -> tuple[int, int]:
        return group.of_leader(group.ranks.rank + 5), group.least(10 - group.ranks.rank)

    assert run_ranks(3, agree) == [(5, 8)] * 3
    assert SINGLE_GROUP.of_leader(5) == SINGLE_GROUP.least(5) == 5


def test_every_rank_refuses_what_differs() -> None:
    def compare(group: ThreadGroup, _: ThreadCollectives) -> str:
        try:
            group.check_equal("num_pages", 7 + group.ranks.rank // 2)
        except ValueError as error:
            return str(error)
        return ""

    assert run_ranks(3, compare) == ["ranks disagree about num_pages: 7 on rank 0, 8 on rank 2"] * 3


def test_the_end_of_a_rank_ends_the_others() -> None:
    def fail(group: ThreadGroup, _: ThreadCollectives) -> None:
        if group.ranks.rank == 1:
            raise OSError("it ended")
        group.least(1)

    with pytest.raises(OSError, match="it ended"):
        run_ranks(3, fail)
