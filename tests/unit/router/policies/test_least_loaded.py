from collections import Counter

import pytest

from tandem.router.policies.least_loaded import LeastLoaded
from tests.fakes.routing import choose_in_turn, make_candidates, routing_request


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 2), (1, 3), (3, 2)])
def test_load_is_spread_evenly(num_prefill: int, num_decode: int) -> None:
    assert choose_in_turn(LeastLoaded(), make_candidates(num_prefill, num_decode), 60) == Counter(
        {f"prefill{i}": 60 // num_prefill for i in range(num_prefill)}
        | {f"decode{i}": 60 // num_decode for i in range(num_decode)}
    )


def test_both_workers_count_and_ties_are_random() -> None:
    candidates = make_candidates(2, 2)
    candidates[0].prefill.num_assigned = 2
    candidates[0].decode.num_assigned = 1
    # Loads of the pairs: 3, 2, 1, 0.
    assert LeastLoaded().choose(candidates, routing_request()) == candidates[3]
    candidates[3].decode.num_assigned = 1
    chosen = [LeastLoaded().choose(candidates, routing_request()) for _ in range(100)]
    assert {candidates.index(pair) for pair in chosen} == {2, 3}


def test_handover_to_another_host_counts_as_a_request() -> None:
    candidates = make_candidates(1, 2)
    here, elsewhere = candidates[0].decode, candidates[1].decode
    elsewhere.host, candidates.spans_hosts = "another", True
    assert {LeastLoaded().choose(candidates, routing_request()).decode for _ in range(20)} == {here}
    here.num_assigned = 2
    assert LeastLoaded().choose(candidates, routing_request()).decode is elsewhere
