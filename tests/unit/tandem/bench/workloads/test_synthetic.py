"""Lengths and common parts of synthetic prompts."""

import pytest

from tandem.bench.workloads.prompts import PromptMaker
from tandem.bench.workloads.synthetic import Lengths, Synthetic


def workload(**options: int) -> Synthetic:
    return Synthetic(PromptMaker(3, "ids"), 3, 20, Lengths(5, 9), Lengths(2, 4), **options)


def test_lengths_are_within_their_limits_and_reach_them() -> None:
    turns = [session.turns[0] for session in workload().sessions()]
    assert {turn.parts[0].num_tokens for turn in turns} == {5, 6, 7, 8, 9}
    assert {turn.num_output_tokens for turn in turns} == {2, 3, 4}
    assert all(len(turn.parts[0].token_ids or ()) == turn.parts[0].num_tokens for turn in turns)
    assert len({bytes(turn.parts[0].token_ids or b"") for turn in turns}) == 20


def test_the_same_seed_makes_the_same() -> None:
    assert workload().sessions() == workload().sessions()


def test_all_begin_with_the_same_system_prompt() -> None:
    sessions = workload(num_system_tokens=30).sessions()
    first = sessions[0].turns[0].parts[0]
    assert (first.role, first.num_tokens) == ("system", 30)
    assert all(session.turns[0].parts[0] == first and len(session.turns[0].parts) == 2 for session in sessions)


def test_turns_are_numbered_and_name_their_answer_placeholders() -> None:
    sessions = workload(num_turns=3, num_system_tokens=4).sessions()
    assert [session.index for session in sessions[:3]] == [0, 3, 6]
    first, second, last = sessions[0].turns
    assert [part.role for part in first.parts] == ["system", "user"]
    assert [part.role for part in second.parts] == ["user"]
    assert first.stand_in is not None and first.stand_in.num_tokens == first.num_output_tokens
    assert last.stand_in is None


def test_each_session_has_a_document_of_its_own_before_its_first_question() -> None:
    plain, sessions = workload(num_turns=2).sessions(), workload(num_turns=2, num_document_tokens=100).sessions()
    for one, other in zip(plain, sessions, strict=True):
        (before,), (after,) = one.turns[0].parts, other.turns[0].parts
        assert after.num_tokens == before.num_tokens + 100
        assert other.turns[1].parts == one.turns[1].parts
    assert len({bytes((session.turns[0].parts[0].token_ids or ())[:100]) for session in sessions}) == len(sessions)


@pytest.mark.parametrize("limits", [(0, 4), (5, 4)])
def test_impossible_lengths_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        Lengths(*limits)
