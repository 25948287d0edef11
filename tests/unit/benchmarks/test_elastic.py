"""The modelled cluster: coarse workers have the times of step-by-step ones, and the planner's aims hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from benchmarks.elastic.attempts import Output, Port
from benchmarks.elastic.batch import Batch
from benchmarks.elastic.clients import Arrival
from benchmarks.elastic.fleet import Setup, SizerMaker
from benchmarks.elastic.load import Curve, made_up, poisson, replayed, steps
from benchmarks.elastic.oracle import Windows, find_oracle
from benchmarks.elastic.outcome import Limits
from benchmarks.elastic.pages import PAGE_SIZE, Pages
from benchmarks.elastic.planned import Planned
from benchmarks.elastic.replay import Replay, replay
from benchmarks.elastic.sizers import Fixed, Report, Schedule, ThresholdRule
from benchmarks.elastic.step_times import StepTimes, worker_of
from benchmarks.elastic.work import worker_rate
from tandem.both_worker.step_budget import FILLED
from tandem.deploy.estimate.gpus import GPUS
from tandem.deploy.supervise.size_planner import Bounds
from tandem.messages import WorkerStats

LIMITS = Limits(0.5, 0.025)


@cache
def times() -> StepTimes:
    return StepTimes(worker_of())


def serve(
    arrivals: Sequence[Arrival], counts: dict[str, int], make_sizer: SizerMaker | None = None, **changes: object
) -> Replay:
    setup = replace(Setup(counts, LIMITS), **changes)  # type: ignore[arg-type]
    return replay(arrivals, times(), setup, make_sizer or (lambda _: Fixed(counts)), arrivals[-1].at + 1.0)


# --- workers ---


@dataclass(eq=False, slots=True)
class Served:
    arrival: Arrival
    num_done: int = 0
    num_decoded: int = 0
    ttft_s: float = 0.0
    last_at: float = 0.0
    gaps: list[float] = field(default_factory=list)


def step_by_step(arrivals: Sequence[Arrival]) -> list[Served]:
    """One worker of role both, one forward pass after the other."""
    by_arrival = [Served(arrival) for arrival in arrivals]
    coming, prompts, running, now = list(by_arrival), list[Served](), list[Served](), 0.0
    while coming or prompts or running:
        if not prompts and not running:
            now = max(now, coming[0].arrival.at)
        while coming and coming[0].arrival.at <= now:
            prompts.append(coming.pop(0))
        num_kv_tokens = sum(one.arrival.num_prompt_tokens + one.num_decoded for one in running)
        kv_s = times().kv_token_s * num_kv_tokens
        left = times().chunk_size
        if prompts and running:
            before = prompts[0].num_done
            took = [times().mixed(len(running), size, size * (before + size / 2)) + kv_s for size in times().sizes]
            fitting = [size for size, seconds in zip(times().sizes, took, strict=True) if seconds <= FILLED * 0.025]
            left = max(fitting)
        num_tokens, num_attended, chunk = 0, 0.0, list[tuple[Served, int]]()
        for prompt in prompts:
            size = min(left - num_tokens, prompt.arrival.num_prompt_tokens - prompt.num_done)
            num_tokens, num_attended = num_tokens + size, num_attended + size * (prompt.num_done + size / 2)
            chunk.append((prompt, size))
        if not running:
            now += times().prefill(num_tokens, num_attended)
        elif num_tokens:
            now += times().mixed(len(running), num_tokens, num_attended) + kv_s
        else:
            now += times().decode[len(running)] + kv_s
        for one in running:
            one.num_decoded += 1
            one.gaps.append(now - one.last_at)
            one.last_at = now
        running = [one for one in running if one.num_decoded + 1 < one.arrival.num_output_tokens]
        for prompt, size in chunk:
            prompt.num_done += size
            if size and prompt.num_done == prompt.arrival.num_prompt_tokens:
                prompts.remove(prompt)
                prompt.ttft_s, prompt.last_at = now - prompt.arrival.at, now
                running.append(prompt)
    return by_arrival


def test_workers_take_the_time_of_all_their_steps() -> None:
    requests = made_up(400)
    arrivals = list(poisson(requests, steps(14.0, (10.0, 14.0)), 0))
    coarse, exact = serve(arrivals, {"any": 1}).requests, step_by_step(arrivals)
    assert len(coarse) == len(exact) > 100
    for seen, one in zip(coarse, exact, strict=True):
        assert seen.ttft_s == pytest.approx(one.ttft_s, abs=1e-6)
        assert seen.ended_at == pytest.approx(one.last_at, abs=1e-6)
        assert (seen.num_gaps, seen.num_slow) == (len(one.gaps), sum(gap > LIMITS.itl_s for gap in one.gaps))


def test_a_batch_passes_several_steps_as_one_by_one() -> None:
    limit_s = times().decode[40] + times().kv_token_s * 40 * (2000 + 150)
    one, many = (Batch(times(), limit_s) for _ in range(2))
    for batch in (one, many):
        for number in range(40):
            batch.join(Output(Port(None), str(number), 0, (), 2000, 500, 1))  # type: ignore[arg-type]
    took = []
    for _ in range(300):
        took.append(one.step_s())
        one.pass_steps(1)
    assert many.steps_s(300) == pytest.approx(sum(took))
    assert [many.steps_within(sum(took[:count]) + 1e-6) for count in (1, 2, 299)] == [1, 2, 299]
    many.pass_steps(300)
    assert (many.num_slow, many.num_kv_tokens) == (one.num_slow, one.num_kv_tokens)
    assert 0 < many.num_slow < 300


def test_a_prefix_is_computed_once_and_kept_until_its_pages_are_needed() -> None:
    pages = Pages(4 * PAGE_SIZE)
    pages.lock((1, 2), 2 * PAGE_SIZE + 10)
    pages.lock((1, 3), 2 * PAGE_SIZE)
    assert pages.num_locked == 3 * PAGE_SIZE + 10
    pages.unlock((1, 2), 2 * PAGE_SIZE + 10)
    pages.unlock((1, 3), 2 * PAGE_SIZE)
    assert (pages.num_locked, pages.num_cached) == (0, 3 * PAGE_SIZE)
    pages.lock((), 2 * PAGE_SIZE)
    assert pages.match((1, 3)) == 2 * PAGE_SIZE, "the latest stay"
    assert pages.match((1, 2)) == PAGE_SIZE


def test_repetitions_of_a_trace_share_prefixes_only_with_themselves() -> None:
    trace = [Arrival(0.0, 1024, 1, (7, 8)), Arrival(10.0, 1024, 1, (7, 9))]
    twice = list(replayed(trace, steps(1.0, (15.0, 1.0), (5.0, 2.0))))
    assert [arrival.at for arrival in twice] == [0.0, 10.0, 15.0]
    assert twice[0].blocks[0] == twice[1].blocks[0] != twice[2].blocks[0]


# --- the cluster ---


def test_prefill_workers_hand_over_to_decode_workers_and_shared_prefixes_are_not_computed_again() -> None:
    shared = [Arrival(number / 2, 4096, 64, (*range(7), 100 + number)) for number in range(20)]
    result = serve(shared, {"prefill": 1, "decode": 1}, shares_prefixes=True)
    first, *others = [seen.ttft_s or 9.0 for seen in result.requests]
    assert result.num_failed == 0
    assert max(others) < first / 2


def test_requests_of_dead_workers_begin_again_and_a_replacement_comes() -> None:
    arrivals = list(poisson([Arrival(0.0, 1000, 200)], steps(6.0, (20.0, 6.0)), 0))
    result = serve(arrivals, {"any": 3}, deaths_per_hour=360.0, start_s=5.0, num_routers=2)
    assert result.usage.num_deaths > 1
    assert result.num_failed == 0 < result.num_restarted
    assert result.gpu_hours == pytest.approx(3 * 20 / 3600, rel=0.2)


def test_without_workers_requests_wait_for_the_first_start() -> None:
    arrivals = list(poisson([Arrival(0.0, 1000, 50)], steps(2.0, (60.0, 2.0)), 0))
    result = serve(arrivals, {"any": 0}, lambda clock: Planned({"any": Bounds(0, 2)}, LIMITS, clock), start_s=20.0)
    assert result.num_failed == 0
    assert 18.0 < max(seen.ttft_s or 0.0 for seen in result.requests) < 25.0


def test_a_full_pool_gives_requests_back_and_all_end() -> None:
    small = StepTimes(worker_of())
    small.pool_tokens = 8 * PAGE_SIZE
    arrivals = [Arrival(0.01 * number, 600, 400) for number in range(12)]
    setup = Setup({"any": 2}, LIMITS)
    result = replay(arrivals, small, setup, lambda _: Fixed({"any": 2}), 10.0)
    assert result.num_failed == 0 < result.num_restarted


# --- sizes that follow the load ---


def test_the_threshold_rule_adds_one_at_a_time_and_waits_for_it() -> None:
    rule = ThresholdRule("any", 1, 4)

    def targets(now: float, queues: Sequence[int], starting: int = 0) -> int:
        stats = [WorkerStats(num_queued=queue, num_total_pages=100, num_locked_pages=30) for queue in queues]
        report = Report(now, {}, {"any": len(queues)}, {"any": starting}, {}, 40.0, {"any": stats})
        return rule.targets(report)["any"]

    assert targets(0.0, [0, 0]) == 1
    assert targets(10.0, [9]) == 1, "too early"
    assert targets(30.0, [9]) == 2
    assert targets(60.0, [9], starting=1) == 2
    assert targets(90.0, [9, 3]) == 3
    assert targets(200.0, [0, 0, 0]) == 2


def test_a_schedule_starts_workers_in_time() -> None:
    sizer = Schedule("any", [(0.0, 1), (100.0, 3), (200.0, 2)], start_s=40.0)
    counts = [sizer.targets(Report(now, {}, {}, {}, {}, 40.0, {}))["any"] for now in (0.0, 59.0, 60.0, 150.0, 210.0)]
    assert counts == [1, 1, 3, 3, 2]


# Few requests make much work on a slow GPU.
LONG = [Arrival(0.0, 8192, 64)]
OBJECTIVES = Limits(3.0, 0.05)


@cache
def slow_times() -> StepTimes:
    return StepTimes(worker_of(GPUS["a100"]))


def follow(load: Curve, first: int, make_sizer: SizerMaker) -> Replay:
    rate = worker_rate(LONG, slow_times())
    arrivals = poisson(LONG, [(moment, value * rate) for moment, value in load], 0)
    setup = Setup({"any": first}, OBJECTIVES, start_s=20.0, turn_s=1.0)
    return replay(arrivals, slow_times(), setup, make_sizer, load[-1][0])


def planned(clock: Callable[[], float]) -> Planned:
    return Planned({"any": Bounds(1, 8)}, OBJECTIVES, clock)


def test_planner_follows_a_tenfold_swing() -> None:
    load = steps(0.5, (40.0, 0.5), (60.0, 5.0), (120.0, 5.0), (60.0, 0.5), (120.0, 0.5))
    result, most = follow(load, 1, planned), follow(load, 8, lambda _: Fixed({"any": 8}))
    assert result.num_failed == 0
    assert result.num_good(100.0, 220.0) >= 0.8 * most.num_good(100.0, 220.0)
    assert result.num_good(280.0, 400.0) >= 0.8 * most.num_good(280.0, 400.0)
    assert result.gpu_s <= 0.75 * most.gpu_s


def test_planner_keeps_still_at_constant_load() -> None:
    result = follow(steps(3.3, (120.0, 3.3)), 5, planned)
    assert len(result.usage.changes) <= 1


@pytest.mark.slow
def test_oracle_has_about_the_workers_that_it_needs() -> None:
    rate = worker_rate(LONG, slow_times())
    arrivals = list(poisson(LONG, steps(0.5 * rate, (60.0, 0.5 * rate), (1.0, 3 * rate), (120.0, 3 * rate)), 0))
    setup = Setup({"any": 1}, OBJECTIVES, start_s=20.0, turn_s=1.0)
    found = find_oracle(arrivals, slow_times(), setup, 181.0, Windows("any", 60.0, 1, 8))
    assert found.replay.share > 0.97
    assert found.counts[0] == 1
    assert all(3 <= count <= 6 for count in found.counts[1:3])
