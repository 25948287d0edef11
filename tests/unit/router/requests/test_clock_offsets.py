import random

import pytest

from tandem.messages import ClockReply, Moment
from tandem.router.requests.clock_offsets import MAX_DRIFT, NUM_FIRST_PROBES, ClockOffset, ClockOffsets
from tandem.router.requests.tracker import RequestTracker
from tests.fakes.request_spec import request_spec

MS = 1_000_000
S = 1_000 * MS


class Way:
    """A probe's way to a worker and back. The router's clock is the true one."""

    def __init__(self, offset_ns: int) -> None:
        self.offset_ns = offset_ns
        self.now = 10**18

    def round_trip(self, there_ns: int, back_ns: int, held_ns: int = 0) -> ClockReply:
        """Args: held_ns: the worker's time between probe and answer."""
        sent = self.now
        received = sent + there_ns + self.offset_ns
        self.now += there_ns + held_ns + back_ns
        return ClockReply(sent, received, received + held_ns)

    def first(self, there_ns: int, back_ns: int) -> ClockOffset:
        return ClockOffset(self.round_trip(there_ns, back_ns), self.now)


def error_ns(offset: ClockOffset, way: Way) -> int:
    return abs(offset.offset_ns - way.offset_ns)


@pytest.mark.parametrize("offset_ns", [0, 7 * S, -7 * S, 3 * MS])
def test_the_error_stays_within_the_uncertainty_however_the_ways_differ(offset_ns: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        way = Way(offset_ns)
        offset = way.first(500 * MS, 900 * MS)
        assert error_ns(offset, way) <= offset.uncertainty_ns(way.now) == 700.14 * MS
        slower = rng.choice((1, 1, 10))
        for _ in range(30):
            there, back = (MS // 5 + round(rng.expovariate(1 / MS)) for _ in range(2))
            reply = way.round_trip(there, slower * back, held_ns=rng.randrange(MS))
            offset.observe(reply, way.now)
            uncertainty = offset.uncertainty_ns(way.now)
            assert error_ns(offset, way) <= uncertainty + 1
            # At most half a round trip, even if one way takes most of the time.
            assert uncertainty <= (there + slower * back) / 2 * 1.001 + 1000
            way.now += S


def test_the_fastest_probe_and_the_fastest_answer_count() -> None:
    way = Way(2 * S)
    offset = way.first(MS, 50 * MS)
    offset.observe(way.round_trip(50 * MS, MS), way.now)
    assert offset.uncertainty_ns(way.now) == pytest.approx(MS, rel=0.01)
    assert error_ns(offset, way) < 10_000


@pytest.mark.parametrize("drift", [MAX_DRIFT, -MAX_DRIFT, MAX_DRIFT / 3])
def test_a_clock_that_drifts_is_followed(drift: float) -> None:
    way = Way(S)
    offset = way.first(MS, MS)
    for second in range(600):
        delay = MS // 10 if second % 60 == 0 else 20 * MS
        offset.observe(way.round_trip(delay, delay), way.now)
        for _ in range(10):
            way.now += S // 10
            way.offset_ns += round(drift * S / 10)
            uncertainty = offset.uncertainty_ns(way.now)
            assert error_ns(offset, way) <= uncertainty + 1
            assert uncertainty < 7 * MS


@pytest.mark.parametrize("drift", [MAX_DRIFT, -MAX_DRIFT])
def test_a_clock_may_drift_while_its_worker_is_stopped_between_probe_and_answer(drift: float) -> None:
    # It drifts by 1 ms, ten times both ways.
    sent, way_ns, held_ns = 10**18, MS // 20, 10 * S
    received, heard = sent + way_ns, sent + 2 * way_ns + held_ns
    drifted_ns = round(drift * held_ns)
    offset = ClockOffset(ClockReply(sent, received, received + held_ns + drifted_ns), heard)
    assert abs(offset.offset_ns - drifted_ns) <= offset.uncertainty_ns(heard) < 2 * MS


def test_what_is_not_heard_again_grows_uncertain() -> None:
    way = Way(0)
    offset = way.first(MS, MS)
    known = offset.uncertainty_ns(way.now)
    assert known == pytest.approx(MS, rel=0.01)
    assert offset.uncertainty_ns(way.now + 100 * S) == known + 10 * MS


@pytest.mark.parametrize("jump_ns", [-3600 * S, 5 * MS, 3600 * S])
def test_after_a_jump_the_newest_round_trip_counts(jump_ns: int) -> None:
    way = Way(0)
    offset = way.first(MS, MS)
    for _ in range(10):
        offset.observe(way.round_trip(MS, MS), way.now)
    way.offset_ns += jump_ns
    offset.observe(way.round_trip(MS, MS), way.now)
    assert error_ns(offset, way) == 0
    assert offset.uncertainty_ns(way.now) == pytest.approx(MS, rel=0.01)


def test_times_that_cannot_be_true_are_refused() -> None:
    with pytest.raises(ValueError, match="round trip of -5 ns"):
        ClockOffset(ClockReply(100, 100, 115), 110)


def test_each_life_of_a_worker_has_a_clock_of_its_own() -> None:
    now = 0
    offsets = ClockOffsets(lambda: now)
    assert (offsets.offset_ns("p"), offsets.uncertainty_ns("p")) == (0, None)
    assert offsets.probe().sent_ns == 0
    now = 2
    again = [offsets.receive("p", ClockReply(0, 1001, 1001)) for _ in range(NUM_FIRST_PROBES)]
    assert again == [True] * (NUM_FIRST_PROBES - 1) + [False]
    assert (offsets.offset_ns("p"), offsets.uncertainty_ns("p")) == (1000, 1)
    assert offsets.uncertainty_ns("d") is None
    offsets.forget("p")
    assert (offsets.offset_ns("p"), offsets.uncertainty_ns("p")) == (0, None)


def test_moments_are_moved_onto_the_router_s_clock() -> None:
    now = 0
    offsets = ClockOffsets(lambda: now)
    now = 2 * MS
    offsets.receive("p", ClockReply(0, 5 * S + MS, 5 * S + MS))
    now = 4 * MS
    offsets.receive("d", ClockReply(0, -3 * S + 2 * MS, -3 * S + 2 * MS))
    tracker = RequestTracker("r", request_spec(moments={}))
    tracker.begin_attempt("p", "d", 60.0)
    tracker.moments["assigned"] = now = 10 * MS
    now = 90 * MS
    offsets.stamp(tracker, [Moment("prefill_started", 5 * S + 20 * MS), Moment("first_token", 5 * S + 30 * MS)])
    assert (tracker.moments["prefill_started"], tracker.moments["first_token"]) == (20 * MS, 30 * MS)
    assert tracker.clock_uncertainty_ns == pytest.approx(MS, rel=0.01)
    # The decode worker reports the start of the prefill worker's shipping.
    offsets.stamp(tracker, [Moment("ship_started", 5 * S + 31 * MS), Moment("decode_started", -3 * S + 40 * MS)])
    assert (tracker.moments["ship_started"], tracker.moments["decode_started"]) == (31 * MS, 40 * MS)
    assert tracker.clock_uncertainty_ns == pytest.approx(2 * MS, rel=0.01)


def test_of_a_clock_that_nobody_knows_yet_the_router_knows_what_must_be() -> None:
    now = 90
    offsets = ClockOffsets(lambda: now)
    tracker = RequestTracker("r", request_spec(moments={}))
    tracker.begin_attempt("p", "d", 60.0)
    tracker.moments["assigned"] = 10
    offsets.stamp(tracker, [Moment("prefill_started", 7 * S), Moment("first_token", -7 * S), Moment("committed", 40)])
    assert [tracker.moments[name] for name in ("prefill_started", "first_token", "committed")] == [90, 10, 40]
    assert tracker.clock_uncertainty_ns == 80
