"""Phases from moments, and their names in the documentation."""

from pathlib import Path

from tandem.lifecycle import PHASES, RECEIVED, phase_timings


def test_phases_are_made_of_moments_that_happened() -> None:
    moments = {RECEIVED: 1_000_000, "tokenized": 3_000_000, "first_token": 10_000_000, "second_token": 12_500_000}
    assert phase_timings(moments) == [("tokenize", 0.0, 2.0), ("first_to_second", 9.0, 2.5)]
    assert len({p.name for p in PHASES}) == len(PHASES)


def test_every_phase_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/architecture.md").read_text()
    for phase in PHASES:
        assert f"`{phase.name}`" in text
