"""Clocks that are seconds apart, over ways that take different times."""

import random

import pytest

from router.clock_offsets import MAX_DRIFT, NUM_FIRST_PROBES, ClockOffset, ClockOffsets
from tandem.messages import ClockReply

MS = 1_000_000
S = 1_000 * MS


class Way:
    """A probe's way to a worker and back. The router's clock is the true one.

    Attributes:
        offset_ns: of the worker's clock.
    """

    def __init__(self, offset_ns: int) -> None:
        self.offset_ns = offset_ns
        self.now = 10**18

    def round_trip(self, there_ns: int, back_ns: int, held_ns: int = 0) -> ClockReply:
        """Args: held_ns: by the worker, between the probe and its answer."""
        sent = self.now
        received = sent + there_ns + self.offset_ns
        self.now += there_ns + held_ns + back_ns
        return ClockReply(sent, received, received + held_ns)


def error_ns(offset: ClockOffset, way: Way) -> int:
    return abs(offset.offset_ns - way.offset_ns)


@pytest.mark.parametrize("offset_ns", [0, 7 * S, -7 * S, 3 * MS])
def test_the_error_stays_within_the_uncertainty_however_the_ways_differ(offset_ns: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        way, offset = Way(offset_ns), ClockOffset()
        assert offset.uncertainty_ns(way.now) is None
        slower = rng.choice((1, 1, 10))
        for _ in range(30):
            there, back = (MS // 5 + round(rng.expovariate(1 / MS)) for _ in range(2))
            reply = way.round_trip(there, slower * back, held_ns=rng.randrange(MS))
            offset.observe(reply, way.now)
            uncertainty = offset.uncertainty_ns(way.now)
            assert uncertainty is not None and error_ns(offset, way) <= uncertainty + 1
            # Half a round trip at most, though most of the time may be spent on one of the two ways.
            assert uncertainty <= (there + slower * back) / 2 + 1
            way.now += S


def test_the_fastest_probe_and_the_fastest_answer_count() -> None:
    way, offset = Way(2 * S), ClockOffset()
    for there, back in ((MS, 50 * MS), (50 * MS, MS)):
        offset.observe(way.round_trip(there, back), way.now)
    uncertainty = offset.uncertainty_ns(way.now)
    assert uncertainty is not None and uncertainty == pytest.approx(MS, rel=0.01)
    assert error_ns(offset, way) < 10_000


@pytest.mark.parametrize("drift", [MAX_DRIFT, -MAX_DRIFT, MAX_DRIFT / 3])
def test_a_clock_that_drifts_is_followed(drift: float) -> None:
    way, offset = Way(S), ClockOffset()
    for second in range(600):
        # The ways are fast once in a minute alone.
        delay = MS // 10 if second % 60 == 0 else 20 * MS
        offset.observe(way.round_trip(delay, delay), way.now)
        for _ in range(10):
            way.now += S // 10
            way.offset_ns += round(drift * S / 10)
            uncertainty = offset.uncertainty_ns(way.now)
            assert uncertainty is not None
            # It had drifted while the probe was under way too.
            assert error_ns(offset, way) <= uncertainty + 10_000
            assert uncertainty < 7 * MS


def test_what_is_not_heard_again_grows_uncertain() -> None:
    way, offset = Way(0), ClockOffset()
    offset.observe(way.round_trip(MS, MS), way.now)
    assert offset.uncertainty_ns(way.now) == MS
    assert offset.uncertainty_ns(way.now + 100 * S) == 11 * MS


@pytest.mark.parametrize("jump_ns", [-3600 * S, 5 * MS, 3600 * S])
def test_after_a_jump_the_newest_round_trip_counts(jump_ns: int) -> None:
    way, offset = Way(0), ClockOffset()
    for _ in range(10):
        offset.observe(way.round_trip(MS, MS), way.now)
    way.offset_ns += jump_ns
    offset.observe(way.round_trip(MS, MS), way.now)
    assert error_ns(offset, way) == 0
    assert offset.uncertainty_ns(way.now) == MS


def test_times_that_cannot_be_true_are_refused() -> None:
    with pytest.raises(ValueError, match="round trip of -5 ns"):
        ClockOffset().observe(ClockReply(100, 100, 115), 110)


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
