"""Numbers of processes by load, over replayed traces."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.deploy.config.bounds import Bounds
from tandem.deploy.supervise.size_planner import HOLD_S, IDLE_S, SizePlanner, SizeReport
from tandem.messages import ForwardTimes
from tandem.router.workers.leans import RouterDemand
from tests.fakes.clock import FakeClock
from tests.fakes.sized_cluster import AIMS, TIMES, SizedCluster

# A worker of the cluster serves about 5 such requests a second.
LOW, HIGH = 2.0, 20.0


def swing(up_s: float = 60.0, high_s: float = 240.0) -> Callable[[float], float]:
    """Returns a load that rises tenfold and falls again."""

    def rate(at_s: float) -> float:
        rising = min(1.0, at_s / up_s)
        falling = min(1.0, max(0.0, (at_s - up_s - high_s) / up_s))
        return LOW + (HIGH - LOW) * (rising - falling)

    return rate


def served_well(cluster: SizedCluster, seconds: float, rate: Callable[[float], float] | float) -> float:
    """Returns the share of requests with an early first token."""
    good, late = cluster.good, cluster.late
    cluster.run(seconds, rate)
    return (cluster.good - good) / (cluster.good - good + cluster.late - late)


def test_a_tenfold_swing_is_followed_up_and_down() -> None:
    cluster = SizedCluster(Bounds(1, 8), start_s=20.0)
    cluster.run(120.0, LOW)
    assert cluster.target == 1
    load = swing()
    cluster.run(60.0, load)
    assert served_well(cluster, 120.0, lambda at_s: load(60.0 + at_s)) > 0.8
    cluster.run(60.0, HIGH)
    # Four workers serve it, and one more may come from noise.
    assert 4 <= cluster.target <= 6
    cluster.run(60.0, lambda at_s: load(300.0 + at_s))
    assert served_well(cluster, 360.0, LOW) > 0.95
    assert cluster.target == 1
    falls = [size for size in cluster.sizes[-840:] if size < 4]
    assert falls == sorted(falls, reverse=True)


@pytest.mark.parametrize("rate", [4.7, 9.6])
def test_constant_load_changes_little(rate: float) -> None:
    """Also where the load is just that of a whole number of workers."""
    cluster = SizedCluster(Bounds(1, 8), seed=round(10 * rate), tick_s=3.0)
    cluster.run(400.0, rate)
    num_changes = len(cluster.changes)
    cluster.run(3600.0, rate)
    assert len(cluster.changes) - num_changes <= 4


def test_a_slow_start_begins_before_its_need() -> None:
    """The load takes ten minutes to rise, and a worker two to start."""
    cluster = SizedCluster(Bounds(1, 8), start_s=120.0)
    cluster.run(120.0, LOW)
    assert served_well(cluster, 600.0, lambda at_s: LOW + (HIGH - LOW) * at_s / 600.0) > 0.8
    assert cluster.planner.reasons["any"] in ("trend", "load")


def test_nothing_runs_without_requests_and_the_first_starts_a_worker() -> None:
    cluster = SizedCluster(Bounds(0, 8))
    cluster.run(60.0, 0.0)
    assert cluster.target == 0
    cluster.run(0.5, 4.0)
    assert cluster.target >= 1 and cluster.planner.reasons["any"] == "queue"
    cluster.run(300.0, LOW)
    assert cluster.target == 1
    cluster.run(IDLE_S - 30.0, 0.0)
    assert cluster.target == 1
    cluster.run(120.0, 0.0)
    assert cluster.target == 0 and cluster.planner.reasons["any"] == "idle"


def test_a_queue_before_an_empty_cluster_gets_all_its_workers_at_once() -> None:
    """Before any worker has measured its times, assumed ones decide."""
    cluster = SizedCluster(Bounds(0, 8))
    cluster.run(60.0, 0.0)
    cluster.run(4.0, HIGH)
    assert cluster.target >= 4


def test_a_dead_worker_is_not_replaced_twice() -> None:
    cluster = SizedCluster(Bounds(1, 8), ready=4)
    cluster.run(300.0, HIGH)
    before = cluster.target
    cluster.kill(1)
    cluster.run(20.0, 15.0)
    assert cluster.target == before


def test_missing_reports_change_nothing() -> None:
    cluster = SizedCluster(Bounds(1, 8), ready=5)
    cluster.run(300.0, HIGH)
    before, num_changes = cluster.target, len(cluster.changes)
    cluster.is_heard = False
    cluster.run(300.0, HIGH)
    assert cluster.target == before
    cluster.is_heard = True
    cluster.run(HOLD_S, HIGH)
    assert len(cluster.changes) == num_changes, "arrivals of the silence are no jump"


def test_a_queue_that_the_times_do_not_explain_adds_workers() -> None:
    """Prompts take twice as long as measured: times alone would leave one worker, with a growing queue."""
    cluster = SizedCluster(Bounds(1, 8), slowness=2.0)
    cluster.run(600.0, 4.5)
    assert cluster.target >= 2
    assert served_well(cluster, 300.0, 4.5) > 0.8
    num_changes = len(cluster.changes)
    cluster.run(1800.0, 4.5)
    assert len(cluster.changes) - num_changes <= 2


def test_slow_first_forward_passes_do_not_count() -> None:
    cluster = SizedCluster(Bounds(1, 8))
    cluster.run(120.0, LOW)
    cluster.is_measured = False
    cluster.said_times = ForwardTimes(0.1, 0.01, 1e-6, 0.4, 0.01, 1e-6)
    cluster.run(60.0, LOW)
    assert cluster.target == 1


class Reports:
    """Reports of one router with a steady load.

    Attributes:
        rate: requests per second, all served.
    """

    def __init__(self, bounds: dict[str, Bounds], prompt: int = 4096, output: int = 256) -> None:
        self.clock = FakeClock()
        self.planner = SizePlanner(bounds, AIMS, self.clock)
        self.ready = {kind: bounded.low for kind, bounded in bounds.items()}
        self._prompt, self._output = prompt, output
        self._arrivals = 0.0
        self._cpu_s = 0.0

    def after(self, seconds: float, rate: float, cpu: float = 0.0) -> dict[str, int]:
        for _ in range(round(seconds)):
            self.clock.advance(1.0)
            self._arrivals += rate
            self._cpu_s += cpu
            others = {f"idle-{number}": RouterDemand() for number in range(1, self.ready.get("router", 1))}
            self.ready = dict(self.planner.plan(SizeReport({"r": self._demand(), **others}, self.ready)))
        return self.ready

    def _demand(self) -> RouterDemand:
        count = int(self._arrivals)
        tokens, attended = count * self._prompt, count * self._prompt**2 // 2
        return RouterDemand(
            count,
            tokens,
            attended,
            tokens,
            attended,
            {"d": 10},
            10 * self._prompt,
            TIMES,
            self._output,
            800_000,
            256,
            whole_tokens=tokens,
            arrivals=count,
            finished=count,
            finished_tokens=count * self._output,
            finished_steps=count * self._output,
            is_measured=True,
            cpu_s=self._cpu_s,
        )


def test_roles_are_sized_apart() -> None:
    bounds = {"prefill": Bounds(1, 16), "decode": Bounds(1, 16)}
    prompts = Reports(bounds, prompt=8192, output=16).after(60.0, 10.0)
    outputs = Reports(bounds, prompt=128, output=2048).after(60.0, 10.0)
    assert prompts["prefill"] > 2 and prompts["decode"] == 1
    assert outputs["prefill"] == 1 and outputs["decode"] > 1


def test_fixed_roles_stay_and_the_other_takes_what_it_can() -> None:
    bounds = {"prefill": Bounds(2, 2), "decode": Bounds(1, 4), "both": Bounds(0, 4)}
    sizes = Reports(bounds).after(60.0, 40.0)
    assert sizes["prefill"] == 2 and sizes["both"] == 4, "prompts that the fixed workers do not compute"


def test_routers_follow_the_cpu_of_their_loops() -> None:
    reports = Reports({"any": Bounds(4, 4), "router": Bounds(1, 4)})
    assert reports.after(120.0, 5.0, cpu=0.4) == {"any": 4, "router": 1}
    assert reports.after(120.0, 5.0, cpu=1.5)["router"] == 3
    assert reports.after(600.0, 5.0, cpu=0.2)["router"] == 1


def test_an_objective_that_no_worker_meets_does_not_take_all_workers() -> None:
    """Steps on a CPU are longer than the objective between tokens."""
    reports = Reports({"any": Bounds(1, 8)})
    reports.planner = SizePlanner({"any": Bounds(1, 8)}, AIMS.of_ms(500.0, 1.0), reports.clock)
    assert reports.after(60.0, 1.0) == {"any": 1}


def test_bounds_may_change() -> None:
    reports = Reports({"any": Bounds(1, 8)})
    assert reports.after(60.0, 1.0) == {"any": 1}
    reports.planner.bounds = {"any": Bounds(3, 4)}
    assert reports.after(1.0, 1.0) == {"any": 3}
    reports.planner.bounds = {"any": Bounds(0, 2)}
    assert reports.after(1.0, 1.0) == {"any": 2}


demands = st.builds(
    RouterDemand,
    prompts=st.integers(0, 1000),
    prompt_tokens=st.integers(0, 10**7),
    attended_tokens=st.integers(0, 10**11),
    num_decoding=st.dictionaries(st.sampled_from("ab"), st.integers(0, 1000)),
    num_kv_tokens=st.integers(0, 10**7),
    times=st.sampled_from([TIMES, ForwardTimes(), ForwardTimes(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]),
    output_tokens=st.floats(0.0, 1e5),
    pool_tokens=st.integers(0, 10**6),
    max_decoding=st.integers(0, 256),
    whole_tokens=st.integers(0, 10**7),
    arrivals=st.integers(0, 10**6),
    num_waiting=st.integers(0, 10**5),
    oldest_wait_s=st.floats(0.0, 1e4),
    num_unplaced=st.integers(0, 10),
    finished=st.integers(0, 1000),
    finished_tokens=st.integers(0, 10**7),
    finished_steps=st.integers(0, 10**7),
    is_measured=st.booleans(),
    cpu_s=st.floats(0.0, 1e6),
)
counts = st.dictionaries(st.sampled_from(["any", "prefill", "decode", "both", "router"]), st.integers(0, 40))
reports = st.builds(
    SizeReport, st.dictionaries(st.sampled_from("rs"), demands), counts, counts, counts, st.just({"any": 20.0})
)


@settings(max_examples=25)
@given(
    st.sampled_from([("any",), ("any", "router"), ("prefill", "decode"), ("prefill", "decode", "both"), ("both",)]),
    st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted),
    st.lists(st.tuples(st.floats(0.0, 1000.0), reports), max_size=8),
)
def test_targets_keep_to_the_bounds(
    kinds: tuple[str, ...], ends: list[int], said: list[tuple[float, SizeReport]]
) -> None:
    clock = FakeClock()
    bounds = Bounds(*ends)
    planner = SizePlanner(dict.fromkeys(kinds, bounds), AIMS, clock)
    for elapsed_s, report in said:
        clock.advance(elapsed_s)
        targets = planner.plan(report)
        assert targets.keys() == set(kinds)
        assert all(bounds.low <= count <= bounds.high for count in targets.values())
        assert all(math.isfinite(count) for count in targets.values())
