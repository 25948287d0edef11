from tandem.router.policies.power_of_two import PowerOfTwo
from tests.fakes.routing import choose_in_turn, make_candidates, routing_request


def test_two_choices_are_nearly_even() -> None:
    counts = choose_in_turn(PowerOfTwo(seed=1), make_candidates(4, 4), 400)
    assert max(counts.values()) - min(counts.values()) <= 12


def test_the_only_pair_is_chosen() -> None:
    only = make_candidates(1, 1)
    assert PowerOfTwo(seed=1).choose(only, routing_request()) == only[0]
