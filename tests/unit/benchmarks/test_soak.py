"""The soak's slopes and verdict, its checks of answers, and a short soak."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.soak.cluster import is_whole
from benchmarks.soak.kinds.fresh import Fresh
from benchmarks.soak.kinds.over_grpc import Cancelled, Embedded, Greedy, Logprobs
from benchmarks.soak.kinds.over_http import CancelledEvents
from benchmarks.soak.report import Outcome
from benchmarks.soak.samples import VALUES, Life, files_below, measure, size_mib
from benchmarks.soak.slopes import Series, Slope, common_slope, student_quantile
from benchmarks.soak.soak import Settings, run
from benchmarks.soak.traffic import KindTally, Tally
from benchmarks.soak.verdict import BOUNDS, Growth, growths, warmup_s
from tandem.deploy.config.bounds import Bounds
from tandem.processes import ProcessId
from tandem.v1 import inference_pb2 as pb

STEP_S = 10.0


def series(values: Sequence[float], start_s: float = 0.0) -> Series:
    return Series([start_s + STEP_S * i for i in range(len(values))], values)


def noise(rng: np.random.Generator, num: int, correlation: float) -> list[float]:
    values = [0.0]
    for _ in range(num - 1):
        values.append(correlation * values[-1] + float(rng.normal()))
    return values


# --- slopes ------------------------------------------------------------------------------------------------------


def test_a_line_has_its_slope_and_no_interval() -> None:
    slope = common_slope([series([3.0 + 0.5 * i for i in range(50)])])
    assert slope is not None
    assert slope.per_hour == pytest.approx(0.5 * 3600 / STEP_S)
    assert slope.high - slope.low == pytest.approx(0.0, abs=1e-6)
    assert (slope.num_lives, slope.num_samples) == (1, 50)


def test_lives_share_a_slope_and_keep_their_own_means() -> None:
    """A later life that begins higher is no growth, and a shorter one has less weight."""
    lives = [series([100.0 + 0.1 * i for i in range(60)]), series([900.0 + 0.1 * i for i in range(20)], 5000.0)]
    slope = common_slope(lives)
    assert slope is not None and slope.per_hour == pytest.approx(36.0)
    assert slope.num_lives == 2
    steps = common_slope([series([100.0] * 30), series([200.0] * 30, 5000.0)])
    assert steps is not None and steps.per_hour == 0.0 and steps.is_flat(0.0)


def test_a_step_has_the_slope_that_it_is_said_to_have() -> None:
    """Of one life, and of two with a step each, midway."""
    lives = [series([40.0] * 60 + [41.0] * 60), series([50.0] * 90 + [51.0] * 90, 5000.0)]
    for chosen in (lives[:1], lives):
        slope = common_slope(chosen)
        assert slope is not None and slope.per_hour == pytest.approx(slope.per_step)
    one = common_slope(lives[:1])
    assert one is not None and one.per_step == pytest.approx(1.5 / (1200 / 3600), rel=0.02)


def test_short_lives_say_nothing() -> None:
    assert common_slope([]) is None
    assert common_slope([series([1.0, 2.0, 3.0, 4.0])]) is None


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.9])
def test_the_interval_has_the_true_slope_nineteen_times_in_twenty(correlation: float) -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        lives = [
            series([0.02 * i + e for i, e in enumerate(noise(rng, num, correlation))], start_s)
            for num, start_s in ((180, 0.0), (120, 2000.0))
        ]
        slope = common_slope(lives)
        assert slope is not None
        hits += slope.low <= 0.02 * 3600 / STEP_S <= slope.high
    # Without regard to the correlation it would be 64 at 0.9.
    assert hits >= 0.88 * 200


def test_a_leak_is_seen_through_noise() -> None:
    rng = np.random.default_rng(2)
    leak, none = (
        common_slope([series([grows * i + 5 * e for i, e in enumerate(noise(rng, 300, 0.5))])]) for grows in (0.5, 0.0)
    )
    assert leak is not None and not leak.is_flat(16.0)
    assert none is not None and none.is_flat(0.0)


def test_student_s_quantiles() -> None:
    for freedom, expected in ((2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)):
        assert student_quantile(freedom) == pytest.approx(expected, rel=0.02)
    assert student_quantile(1.5) > student_quantile(2)


# --- verdict -----------------------------------------------------------------------------------------------------


def slope_of(per_hour: float, low: float, high: float) -> Slope:
    return Slope(per_hour, low, high, 1, 100, per_step=3.0)


@pytest.mark.parametrize(
    ("slope", "is_flat"),
    [
        (None, True),
        (slope_of(500.0, -1.0, 1001.0), True),
        (slope_of(-50.0, -60.0, -40.0), True),
        (slope_of(15.9, 15.0, 17.0), True),
        (slope_of(17.0, 1.0, 33.0), False),
    ],
)
def test_what_is_flat(slope: Slope | None, is_flat: bool) -> None:
    assert BOUNDS["anon MiB"] == 16.0
    assert Growth("router", "anon MiB", 100.0, slope).is_flat == is_flat


def life(kind: str, values: Sequence[float], are_usual: Sequence[bool], start_s: float = 0.0) -> Life:
    made = Life(ProcessId(7, int(start_s)), kind)
    for i, (value, is_usual) in enumerate(zip(values, are_usual, strict=True)):
        made.times_s.append(start_s + STEP_S * i)
        made.are_usual.append(is_usual)
        for name in VALUES:
            made.values[name].append(value)
    return made


def test_pss_is_shown_but_not_judged() -> None:
    growth = Growth("router", "PSS MiB", 100.0, slope_of(500.0, 400.0, 600.0))
    assert growth.bound is None and growth.is_flat


def test_warm_up_and_unusual_samples_do_not_count() -> None:
    duration_s = 3600.0
    num_warm = int(warmup_s(duration_s) / STEP_S)
    # Fills, is flat, and has more while there are more workers.
    values = [float(min(i, num_warm)) for i in range(200)]
    are_usual = [not 120 <= i < 150 for i in range(200)]
    values = [value if is_usual else value + 50 for value, is_usual in zip(values, are_usual, strict=True)]
    found = growths([life("decode", values, are_usual), life("", [1.0] * 9, [True] * 9)], duration_s)
    assert {growth.kind for growth in found} == {"decode"} and len(found) == len(VALUES)
    for growth in found:
        assert growth.slope is not None and growth.slope.per_hour == pytest.approx(0.0, abs=1e-6)
        assert growth.is_flat


def test_the_first_half_of_a_life_does_not_count() -> None:
    """A pool that fills for twenty minutes of fifty is no leak."""
    values = [50.0 + min(i, 120) for i in range(300)]
    for growth in growths([life("router", values, [True] * 300)], 3600.0):
        assert growth.slope is not None and growth.slope.per_hour == pytest.approx(0.0, abs=1e-6)
    (growth, *_) = growths([life("router", list(range(300)), [True] * 300)], 3600.0)
    assert not growth.is_flat


def test_a_step_within_the_resolution_is_flat() -> None:
    """Two threads of a pool in the only ten minutes that count; a thread a minute is a leak."""
    (growth,) = _threads([40.0] * 90 + [42.0] * 30)
    assert growth.slope is not None and growth.slope.low > 0 and growth.slope.per_hour > BOUNDS["threads"]
    assert growth.resolution is not None and growth.resolution == pytest.approx(2 * 1.5 * 6, rel=0.03)
    assert growth.is_flat
    (leak,) = _threads([40.0 + i // 6 for i in range(120)])
    assert not leak.is_flat


def _threads(values: Sequence[float]) -> list[Growth]:
    found = growths([life("decode", values, [True] * len(values))], 1200.0)
    return [growth for growth in found if growth.value == "threads"]


def test_a_life_too_short_is_not_judged() -> None:
    (growth, *_) = growths([life("router", list(range(40)), [True] * 40)], 3600.0)
    assert growth.slope is None and growth.is_flat
    (growth, *_) = growths([life("router", list(range(200)), [True] * 200)], 3600.0)
    assert growth.slope is not None and not growth.is_flat


def outcome(**changes: Any) -> Outcome:
    tally = Tally(kinds={"greedy": KindTally(num_right=3)})
    fields: dict[str, Any] = {"tally": tally, "growths": [], "faults": {}, "troubles": [], "remarks": [], "host": {}}
    return Outcome(minutes=1.0, **{**fields, **changes})


def test_each_kind_of_failure_fails_the_soak() -> None:
    assert outcome().has_passed
    assert outcome(remarks=["a tie"]).has_passed
    assert not outcome(tally=Tally(kinds={"greedy": KindTally()})).has_passed
    assert not outcome(tally=Tally(kinds={"greedy": KindTally(num_right=9, num_wrong=1)})).has_passed
    assert not outcome(tally=Tally(kinds={"greedy": KindTally(num_right=9, num_failed=1)})).has_passed
    assert not outcome(troubles=["pages held"]).has_passed
    assert not outcome().with_trouble("processes left").has_passed
    leak = Growth("router", "threads", 40.0, slope_of(9.0, 8.0, 10.0))
    assert not outcome(growths=[leak]).has_passed and outcome(growths=[leak]).leaks == ["router: threads"]
    json.dumps(outcome(growths=[leak]).as_json())


# --- samples and answers -----------------------------------------------------------------------------------------


def test_a_process_is_measured() -> None:
    before = measure(os.getpid())
    assert set(before) == set(VALUES) and min(before["anon MiB"], before["threads"], before["mappings"]) > 0
    with Path(os.devnull).open() as _:
        assert measure(os.getpid())["descriptors"] == before["descriptors"] + 1
    assert measure(2**22 - 1) == {}


def test_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "log").write_bytes(bytes(3 * 2**20))
    found = list(files_below(tmp_path))
    assert len(found) == 1 and size_mib(found) == pytest.approx(3.0, abs=0.1)
    assert list(files_below(tmp_path / "none")) == []


def test_a_part_of_a_cancelled_answer_is_right() -> None:
    cancelled, events = Cancelled((), ()), CancelledEvents((), ())
    assert cancelled.is_right([1, 2, 3], [1, 2]) and cancelled.is_right([1, 2, 3], [])
    assert not cancelled.is_right([1, 2, 3], [1, 3]) and not cancelled.is_right([1], [1, 2])
    assert events.is_right("abc", "ab") and not events.is_right("abc", "b")
    assert not Greedy((), ()).is_right([1, 2, 3], [1, 2])


def test_values_may_be_rounded_but_not_missing() -> None:
    assert Embedded((), ()).is_right([0.5, 0.25], [0.5001, 0.25])
    assert not Embedded((), ()).is_right([0.5, 0.25], [0.51, 0.25])
    assert not Embedded((), ()).is_right([0.5, 0.25], [0.5])
    logprobs = Logprobs((), ())
    assert logprobs.is_right(([1], [-0.5]), ([1], [-0.5005]))
    assert not logprobs.is_right(([1], [-0.5]), ([2], [-0.5])) and not logprobs.is_right(([1], [-0.5]), ([1], []))


def test_new_prompts_may_differ_only_behind_a_tie() -> None:
    fresh = Fresh((), ())
    assert fresh.is_right(None, ([(1, 0.5), (2, 1e-5), (3, 0.5)], [(1, 0.5), (9, 1e-5), (8, 0.5)]))
    assert not fresh.is_right(None, ([(1, 0.5), (2, 0.1)], [(1, 0.5), (3, 0.1)]))


# --- sizes -------------------------------------------------------------------------------------------------------


def cluster_of(num_prefill: int, num_decode: int, num_linked: int | None = None) -> pb.ServerInfo:
    links = [f"decode-{i}" for i in range(num_decode if num_linked is None else num_linked)]
    return pb.ServerInfo(
        ready=True,
        routers=[pb.RouterStatus(router_id="router-0", alive=True)],
        workers=[
            *(
                pb.WorkerStatus(worker_id=f"prefill-{i}", role="prefill", alive=True, linked_to=links)
                for i in range(num_prefill)
            ),
            *(pb.WorkerStatus(worker_id=f"decode-{i}", role="decode", alive=True) for i in range(num_decode)),
        ],
    )


def test_a_whole_cluster_has_a_size_within_its_bounds_and_all_links() -> None:
    sizes = {"prefill": Bounds(1, 3), "decode": Bounds(2, 2)}
    assert is_whole(cluster_of(1, 2), sizes) and is_whole(cluster_of(3, 2), sizes)
    assert not is_whole(cluster_of(0, 2), sizes) and not is_whole(cluster_of(4, 2), sizes)
    assert not is_whole(cluster_of(2, 3), sizes) and not is_whole(cluster_of(2, 2, num_linked=1), sizes)
    assert not is_whole(None, sizes)


# --- the whole ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_minute_s_soak_passes(tmp_path: Path) -> None:
    found = run(Settings(minutes=1.0, out=tmp_path), print)
    assert found.troubles == [] and found.tally.notes == [] and found.leaks == []
    assert found.has_passed and found.faults["kill -9 of a decode worker"] == 1
    assert json.loads((tmp_path / "soak.json").read_text())["passed"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_streams_are_exact_while_sizes_change() -> None:
    found = run(Settings(minutes=1.5, is_elastic=True), print)
    assert found.troubles == [] and found.tally.notes == []
    assert found.has_passed and found.faults["scale"] and found.faults["kill -9 of a worker amid scale"]
