"""Where the next turn is served, in the model of a cluster."""

from dataclasses import replace

from benchmarks.next_turn import MULTI_TURN, serve
from tandem.router.workers.placement import AUTO, DISAGGREGATED


def test_a_turn_is_computed_where_the_conversation_is_and_ships_no_more_than_with_two_workers_for_each() -> None:
    workload = replace(MULTI_TURN, num_turns=3)
    auto, apart = (serve(workload, placement, rate=20.0, seconds=15.0, seed=1) for placement in (AUTO, DISAGGREGATED))
    for number, (turn, other) in enumerate(zip(auto, apart, strict=True)):
        assert turn.turn == number + 1 and turn.prompt_tokens == other.prompt_tokens == 2560 + 768 * number
        # What the turn adds, and what of the answer before it is in no full page; now and then a beginning anew.
        assert 512 <= turn.computed_tokens < 700
        assert turn.apart < other.apart == 1.0
        assert turn.shipped_pages < other.shipped_pages < turn.prompt_tokens / 16
