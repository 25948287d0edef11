"""Phases from moments, and their names in the documentation."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.lifecycle import (
    ASSIGNED,
    CRITICAL_PATH,
    DECODE_MOMENTS,
    DECODE_STARTED,
    ENDED,
    FIRST_ASSIGNED,
    FIRST_TOKEN,
    FIRST_TOKEN_SENT,
    LAST_TOKEN,
    PHASES,
    PREFILL_MOMENTS,
    PREFILL_STARTED,
    RECEIVED,
    ROUTER_ATTEMPT_MOMENTS,
    TOKENIZED,
    critical_path,
    now_ns,
    phase_timings,
)

ALL_MOMENTS = (
    *(RECEIVED, TOKENIZED, FIRST_ASSIGNED, *ROUTER_ATTEMPT_MOMENTS),
    *(*PREFILL_MOMENTS, *DECODE_MOMENTS, FIRST_TOKEN_SENT, ENDED),
)
MS = 1_000_000


def path(**at_ms: float) -> dict[str, tuple[float, float]]:
    """Return start and end of each critical phase. Args: at_ms: the moments."""
    phases = critical_path({name: round(at * MS) for name, at in at_ms.items()})
    return {p.name: (p.start_ms, p.start_ms + p.duration_ms) for p in phases}


def test_phases_need_recorded_moments() -> None:
    moments = {RECEIVED: 1_000_000, "tokenized": 3_000_000, "first_token": 10_000_000, "second_token": 12_500_000}
    assert phase_timings(moments) == [
        ("tokenize", 0.0, 2.0, True),
        ("assign", 2.0, 7.0, True),
        ("handover", 9.0, 0.0, True),
        ("first_to_second", 9.0, 2.5, False),
    ]
    assert len({p.name for p in PHASES}) == len(PHASES)


@given(
    st.integers(1, 2**62),
    st.dictionaries(st.sampled_from(ALL_MOMENTS[1:]), st.integers(-(10**12), 10**13)),
    st.integers(0, 10**13),
)
def test_critical_path_covers_the_request_despite_clock_skew(
    received: int, after_ns: dict[str, int], lasted_ns: int
) -> None:
    moments = {name: received + after for name, after in after_ns.items()}
    moments |= {RECEIVED: received, ENDED: received + lasted_ns}
    phases = critical_path(moments)
    at = 0.0
    for phase in phases:
        assert phase.start_ms == pytest.approx(at, abs=1e-3)
        assert phase.duration_ms >= 0
        at = phase.start_ms + phase.duration_ms
    assert at == pytest.approx(lasted_ns / 1e6, abs=1e-3)
    assert sum(p.duration_ms for p in phases) == pytest.approx(lasted_ns / 1e6, abs=1e-3)
    assert len({p.name for p in phases}) == len(phases)
    timings = phase_timings(moments)
    assert [t for t in timings if t.on_critical_path] == phases == timings[: len(phases)]
    for timing in timings:
        assert timing.start_ms >= 0 and timing.duration_ms >= 0
        assert timing.start_ms + timing.duration_ms <= lasted_ns / 1e6 + 1e-3
    if lasted_ns > 0:
        (e2e,) = [t for t in timings if t.name == "e2e"]
        assert e2e.duration_ms == lasted_ns / 1e6


@given(st.lists(st.sampled_from(ALL_MOMENTS[1:-1]), unique=True))
def test_running_request_shows_its_phases_so_far(known: list[str]) -> None:
    moments = {RECEIVED: 5} | {name: 5 + ALL_MOMENTS.index(name) * MS for name in known}
    phases = critical_path(moments)
    latest = max(moments[spec.start] for spec in CRITICAL_PATH if spec.start in moments)
    assert sum(p.duration_ms for p in phases) == pytest.approx((latest - 5) / 1e6)


def test_a_whole_request_has_every_phase() -> None:
    moments = {"received": 0, "tokenized": 1, "assigned": 3, "prefill_started": 6, "first_token": 10}
    assert path(**moments, decode_started=15, last_token=21, ended=28) == {
        "tokenize": (0, 1),
        "assign": (1, 3),
        "prefill_queue": (3, 6),
        "prefill": (6, 10),
        "handover": (10, 15),
        "decode": (15, 21),
        "finish": (21, 28),
    }


def test_end_closes_open_phases() -> None:
    queued = path(received=0, tokenized=1, assigned=2, ended=9)
    assert queued == {"tokenize": (0, 1), "assign": (1, 2), "prefill_queue": (2, 9)}
    waiting = path(received=0, tokenized=1, waiting=1.5, ended=9)
    assert waiting == {"tokenize": (0, 1), "assign": (1, 9)}
    handed_over = path(received=0, tokenized=1, assigned=2, prefill_started=3, first_token=4, ended=9)
    assert handed_over["handover"] == (4, 9)
    decoding = path(received=0, tokenized=1, assigned=2, prefill_started=3, first_token=4, decode_started=5, ended=9)
    assert decoding["decode"] == (5, 9)


def test_single_token_is_not_handed_over() -> None:
    one_token = path(received=0, tokenized=1, assigned=2, prefill_started=3, first_token=4, last_token=4, ended=6)
    assert list(one_token) == ["tokenize", "assign", "prefill_queue", "prefill", "finish"]
    assert one_token["finish"] == (4, 6)


def test_early_ended_attempts_are_one_phase() -> None:
    restarted = path(received=0, tokenized=1, first_assigned=2, assigned=7, prefill_started=8, ended=9)
    assert restarted["assign"] == (1, 2)
    assert restarted["earlier_attempts"] == (2, 7)
    assert restarted["prefill"] == (8, 9)
    # No further workers.
    assert path(received=0, tokenized=1, first_assigned=2, waiting=4, ended=9)["earlier_attempts"] == (2, 9)


def test_a_first_token_from_an_earlier_attempt_was_not_delivered_by_this_one() -> None:
    moments = {RECEIVED: 0, ENDED: 9, FIRST_ASSIGNED: 1, FIRST_TOKEN_SENT: 3, ASSIGNED: 5, FIRST_TOKEN: 7}
    assert "first_to_client" not in {t.name for t in phase_timings(moments)}
    delivered = {t.name: t for t in phase_timings({**moments, FIRST_TOKEN_SENT: 8})}
    assert delivered["first_to_client"].duration_ms == 1e-6


def test_effect_is_not_earlier_than_its_cause() -> None:
    moments = {RECEIVED: 0, TOKENIZED: 1, ASSIGNED: 5, PREFILL_STARTED: 2, FIRST_TOKEN: 7, DECODE_STARTED: 6}
    durations = {t.name: t.duration_ms * MS for t in critical_path({**moments, LAST_TOKEN: 99, ENDED: 9})}
    assert durations == {
        "tokenize": 1,
        "assign": 4,
        "prefill_queue": 0,
        "prefill": 2,
        "handover": 0,
        "decode": 2,
        "finish": 0,
    }


def test_wall_clock_changes_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = now_ns()
    assert abs(before - time.time_ns()) < 60 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= now_ns() - before < 60 * 10**9


def test_every_phase_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/requests.md").read_text()
    for phase in PHASES:
        assert f"`{phase.name}`" in text
