"""Leans of workers by load."""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.supervise.capacities import Demand, Layout
from tandem.deploy.supervise.role_planner import HOLD_S, RolePlanner
from tandem.messages import ForwardTimes
from tandem.router.workers.leans import Lean, RouterDemand
from tandem.router.workers.objectives import Objectives
from tests.fakes.clock import FakeClock

AIMS = Objectives(0.5, 0.025)
# About an H200 with a model of 8 billion parameters.
TIMES = ForwardTimes(2.4e-3, 22e-6, 7e-10, 4e-3, 16e-6, 32e-9)
# Mixed steps read the weights once.
MIXED_TIMES = replace(TIMES, prefill_s=0.0)
PROMPT = 4096
OUTPUT = 256.0
CONTEXT = PROMPT + 128


class Planned:
    """A cluster with a steady load; it plans twice a second.

    Attributes:
        num_decoding: requests at each worker.
        elsewhere: uncached tokens of a prompt at half of the workers.
    """

    def __init__(self, num_workers: int = 4, times: ForwardTimes = TIMES) -> None:
        self.clock = FakeClock()
        self._times = times
        self.planner = RolePlanner(AIMS, self.clock)
        self.prompts_per_s = 0.0
        self.elsewhere = PROMPT
        self.num_decoding = {f"w{i}": 0 for i in range(num_workers)}
        self._prompts = 0.0

    def demand(self) -> RouterDemand:
        prompts, decoding = round(self._prompts), sum(self.num_decoding.values())
        attended = prompts * PROMPT * PROMPT // 2
        return RouterDemand(
            prompts,
            prompts * PROMPT,
            attended,
            prompts * self.elsewhere,
            prompts * self.elsewhere * self.elsewhere // 2,
            self.num_decoding,
            decoding * PROMPT,
            self._times,
            OUTPUT,
            800_000,
            256,
        )

    def after(self, seconds: float, demands: Mapping[str, RouterDemand] | None = None) -> Counter[Lean]:
        """Returns the number of workers by lean, this time later."""
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            self._prompts += self.prompts_per_s / 2
            self.planner.plan(demands or {"r": self.demand()})
        return Counter(self.planner.leans.values())

    def decode(self, total: int) -> None:
        count = len(self.num_decoding)
        self.num_decoding = dict.fromkeys(self.num_decoding, total // count)


def test_nobody_leans_where_there_is_little_to_do() -> None:
    planned = Planned()
    assert planned.after(2.0) == {"none": 4}
    planned.prompts_per_s = 5.0
    planned.decode(12)
    assert planned.after(20.0) == {"none": 4}


def test_a_heavy_load_has_workers_lean_and_its_end_has_them_stop() -> None:
    planned = Planned()
    planned.prompts_per_s = 20.0
    planned.decode(100)
    leans = planned.after(10.0)
    assert leans["prefill"] >= 2
    assert leans["prefill"] + leans["decode"] + leans["both"] == 4
    assert leans["prefill"] < 4
    planned.prompts_per_s = 0.5
    planned.decode(4)
    assert planned.after(15.0) == {"none": 4}


def test_long_prompts_that_would_wait_for_each_other_beside_decode_steps_have_workers_lean() -> None:
    planned = Planned(times=MIXED_TIMES)
    # A prompt takes 0.1 s alone, and nearly twice as long beside the steps of 30 requests.
    planned.prompts_per_s = 22.0
    planned.decode(120)
    leans = planned.after(10.0)
    assert leans["prefill"] == 2 and leans["none"] == 0


def test_a_plan_that_serves_no_more_than_workers_which_all_do_both_is_over() -> None:
    planned = Planned(times=MIXED_TIMES)
    planned.prompts_per_s = 1.0
    planned.decode(320)
    # A change of load may leave this: the worker that leans to decode has longer steps for nothing.
    planned.planner.leans = {"w0": "decode", "w1": "both", "w2": "both", "w3": "both"}
    assert planned.after(HOLD_S + 2.0) == {"none": 4}


def test_nobody_leans_where_conversations_would_be_computed_anew() -> None:
    planned = Planned()
    planned.prompts_per_s = 20.0
    planned.decode(100)
    assert planned.after(10.0)["prefill"] >= 2
    planned.elsewhere = 4 * PROMPT
    assert planned.after(10.0) == {"none": 4}


def test_roles_follow_a_load_that_turns() -> None:
    planned = Planned()
    planned.prompts_per_s = 20.0
    planned.decode(60)
    prefill = planned.after(10.0)["prefill"]
    planned.prompts_per_s = 6.0
    planned.decode(380)
    # The change comes within a plan's hold.
    leans = planned.after(HOLD_S + 1.0)
    assert leans["prefill"] < prefill
    assert leans["decode"] + leans["both"] >= 3


def test_a_plan_holds_for_a_while() -> None:
    planned = Planned()
    changes = []
    for i in range(60):
        # Between these loads two plans are nearly equal.
        planned.prompts_per_s = 20.0 if i % 2 else 17.0
        planned.decode(100 if i % 2 else 130)
        before = dict(planned.planner.leans)
        planned.after(0.5)
        if before and before != planned.planner.leans:
            changes.append(planned.clock())
    assert all(later - earlier >= HOLD_S for earlier, later in itertools.pairwise(changes))
    assert len(changes) < 6


def test_those_that_decode_most_go_on_with_it() -> None:
    planned = Planned()
    planned.prompts_per_s = 20.0
    planned.num_decoding = {"w0": 2, "w1": 90, "w2": 0, "w3": 3}
    planned.after(5.0)
    assert planned.planner.leans["w1"] in ("decode", "both")
    assert planned.planner.leans["w2"] == "prefill"


def test_what_several_routers_say_counts_together_and_one_that_is_started_again_begins_anew() -> None:
    one, two = Planned(), Planned()
    one.prompts_per_s, two.prompts_per_s = 20.0, 10.0
    one.decode(100)
    two.decode(50)
    for _ in range(20):
        one.after(0.5)
        two.clock.advance(0.5)
        two._prompts += two.prompts_per_s / 2
        two.planner.plan({"a": two.demand(), "b": two.demand()})
    assert one.planner.leans == two.planner.leans
    assert "prefill" in one.planner.leans.values()
    # Counts restart at 0, which is no negative load.
    two._prompts = 0.0
    two.planner.plan({"a": two.demand(), "b": two.demand()})
    assert min(two.planner._rates) >= 0.0


def test_a_worker_that_leaves_leans_no_more_and_one_that_comes_is_planned_for() -> None:
    planned = Planned()
    planned.prompts_per_s = 20.0
    planned.decode(100)
    planned.after(10.0)
    del planned.num_decoding["w3"]
    planned.num_decoding["w9"] = 0
    planned.after(0.5)
    assert set(planned.planner.leans) == {"w0", "w1", "w2", "w9"}
    assert planned.planner.leans["w9"] != "none"


def test_one_worker_alone_and_nobody_at_all_have_no_plan() -> None:
    planned = Planned(1)
    planned.prompts_per_s = 50.0
    planned.decode(100)
    assert planned.after(10.0) == {"none": 1}
    assert planned.after(1.0, {"r": RouterDemand()}) == {}
    assert RolePlanner(AIMS, FakeClock()).plan({}) == {}


shares = st.floats(0.0, 3.0)


has = st.floats(0.01, 1.0)


@given(shares, shares, shares, has, has, has, st.floats(0.5, 1.0), st.integers(4, 40))
def test_more_workers_of_any_kind_never_serve_less(
    prompts: float,
    requests: float,
    places: float,
    prefill: float,
    decode: float,
    both: float,
    filled: float,
    count: int,
) -> None:
    demand = Demand(prompts, 2 * prompts, requests, places, prefill, decode, both, filled)
    layout = Layout(count // 3, count // 4, count - count // 3 - count // 4)
    for more in range(3):
        bigger = Layout(*(number + (i == more) for i, number in enumerate(layout)))
        assert demand.multiple(bigger) >= demand.multiple(layout)


@pytest.mark.parametrize("count", [2, 3, 17, 500])
def test_some_compute_prompts_and_some_decode_whatever_the_number(count: int) -> None:
    planned = Planned(count)
    planned.prompts_per_s = 5.0 * count
    planned.decode(30 * count)
    leans = planned.after(10.0)
    assert leans["prefill"] < count
    assert leans["decode"] < count
    assert sum(leans.values()) == count


_COUNTS = st.integers(0, 10**6)
_SECONDS = st.sampled_from([0.0, 1e-9, 1e-3, 10.0])


@given(
    st.lists(
        st.builds(
            RouterDemand,
            *[_COUNTS] * 5,
            st.dictionaries(st.sampled_from("abc"), st.integers(0, 500)),
            _COUNTS,
            st.builds(ForwardTimes, *[_SECONDS] * 6),
            st.floats(0.0, 1e5),
            *[_COUNTS] * 2,
        ),
        max_size=3,
    )
)
def test_whatever_routers_say_makes_a_plan_for_all_workers_that_they_name(said: list[RouterDemand]) -> None:
    clock = FakeClock()
    planner = RolePlanner(AIMS, clock)
    for _ in range(4):
        clock.advance(2.0)
        leans = planner.plan({f"r{i}": demand for i, demand in enumerate(said)})
        assert leans.keys() == {name for demand in said for name in demand.num_decoding}
