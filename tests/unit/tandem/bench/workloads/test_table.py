"""Sessions with times of arrivals or of a trace."""

from itertools import islice

import pytest

from tandem.bench.arrivals import ArrivalConfig, arrival_times
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.workloads.synthetic import Lengths
from tandem.bench.workloads.table import make_sessions

SHORT = Lengths(2, 2)
RATE = ArrivalConfig("poisson", 10.0)


def test_each_session_leaves_at_its_arrival() -> None:
    sessions = make_sessions(WorkloadConfig(num_requests=5, input_lengths=SHORT, seed=4), RATE)
    assert [session.due_s for session in sessions] == list(islice(arrival_times(RATE, 4), 5))


def test_as_many_are_made_as_arrive_in_the_time() -> None:
    sessions = make_sessions(WorkloadConfig(input_lengths=SHORT), RATE, 30.0)
    assert 200 < len(sessions) < 400
    assert all(session.due_s is not None and session.due_s < 30.0 for session in sessions)
    with pytest.raises(ValueError, match="--requests"):
        BenchConfig(EndpointConfig("grpc://h:1"), duration_s=5.0)


def test_arrivals_beside_streams_begin_after_the_lead() -> None:
    config = WorkloadConfig(
        kind="steady-streams", num_requests=3, num_streams=2, input_lengths=SHORT, stream_output_tokens=9, lead_s=5.0
    )
    *streams, first, _, last = make_sessions(config, ArrivalConfig("constant", 1.0))
    assert [(session.group, session.due_s) for session in streams] == [("streams", None)] * 2
    assert (first.due_s, last.due_s) == (5.0, 7.0) and first.group == "requests"
    assert streams[0].turns[0].num_output_tokens == 9 and streams[0].turns[0].parts != streams[1].turns[0].parts


def test_spread_streams_start_at_different_points() -> None:
    config = WorkloadConfig(
        kind="steady-streams",
        num_requests=1,
        num_streams=4,
        stream_input_tokens=10,
        stream_output_tokens=100,
        spread_streams=True,
    )
    *streams, _ = make_sessions(config, ArrivalConfig("constant", 1.0))
    begun = [session.begins_with for session in streams]
    lengths = [(turn.parts[0].num_tokens, turn.num_output_tokens) for turn in begun if turn is not None]
    assert lengths == [(10, 100), (35, 75), (60, 50), (85, 25)]
    assert {session.turns[0].num_output_tokens for session in streams} == {100}


def test_endless_prompt_generation_is_refused() -> None:
    with pytest.raises(ValueError, match="--requests"):
        make_sessions(WorkloadConfig(), ArrivalConfig("constant", 1e9), duration_s=60.0)
