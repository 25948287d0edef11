from collections import Counter

import pytest

from tandem.router.policies.round_robin import RoundRobin
from tests.fakes.routing import choose_in_turn, make_candidates


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 2), (1, 3), (3, 2)])
def test_workers_of_both_kinds_take_turns(num_prefill: int, num_decode: int) -> None:
    assert choose_in_turn(RoundRobin(), make_candidates(num_prefill, num_decode), 60) == Counter(
        {f"prefill{i}": 60 // num_prefill for i in range(num_prefill)}
        | {f"decode{i}": 60 // num_decode for i in range(num_decode)}
    )


def test_load_is_ignored() -> None:
    candidates = make_candidates(2, 2)
    candidates[0].prefill.num_assigned = 100
    assert choose_in_turn(RoundRobin(), candidates, 20)["prefill0"] == 10
