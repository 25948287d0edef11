"""Costs over arrays are those of cost_model.py."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.messages import ForwardTimes, WorkerStats
from tandem.router.policies import cost_model
from tandem.router.policies.worker_costs import WorkerCosts
from tandem.router.workers.leans import LEANS
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.worker import Worker
from tests.fakes.scripted_worker import hello

forward_times = st.builds(
    ForwardTimes,
    *(st.floats(0, most) for most in (0.1, 1e-3, 1e-8)),
    *(st.floats(1e-3, 0.05), st.floats(0, 1e-3), st.floats(0, 1e-7), st.floats(0, 0.5)),
)
objectives = st.builds(Objectives, st.floats(0.05, 5), st.floats(0.005, 0.1))


@st.composite
def workers(draw: st.DrawFn) -> Worker:
    most, pages = draw(st.sampled_from((0, 8, 256))), draw(st.integers(1, 100_000))
    said = replace(hello("w", "both", num_pages=pages), max_batch_size=most)
    worker = Worker(said, lambda _: None, lambda _: None, 0.0, 0.0)
    change(worker, draw)
    return worker


def change(worker: Worker, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    worker.add_load(
        *(draw(st.integers(0, most)) for most in (1, 100_000, 300, 10**6, 10**6)),
    )
    leased, locked = (draw(st.integers(0, worker.hello.num_pages)) for _ in range(2))
    stats = WorkerStats(num_leased_pages=leased, num_locked_pages=locked, forward_times=draw(forward_times))
    worker.take_stats(stats)
    worker.set_lean(draw(st.sampled_from(LEANS)))
    worker.rates.mean_output_steps = draw(st.floats(0, 2000))
    worker.rates.mean_drafts = draw(st.floats(0, 7))


class NoChance(random.Random):
    def random(self) -> float:
        return 0.0


@given(st.lists(workers(), min_size=1, max_size=5), objectives, st.data())
def test_each_cost_is_the_plain_one(cluster: list[Worker], aims: Objectives, data: st.DataObject) -> None:
    costs = WorkerCosts(NoChance())
    costs.update(cluster, aims)
    # Some loads change.
    for worker in cluster:
        if data.draw(st.booleans()):
            change(worker, data.draw)
    costs.update(cluster, aims)
    length = data.draw(st.integers(1, 50_000))
    ready = {worker: data.draw(st.integers(0, length)) for worker in cluster if data.draw(st.booleans())}
    known = costs.of(ready)
    assert known.tolist() == [ready.get(worker, 0) for worker in cluster]
    states = [cost_model.state_of(worker) for worker in cluster]
    lacking = [length - ready.get(worker, 0) for worker in cluster]
    assert costs.prefill(known, length).tolist() == pytest.approx(
        [
            cost_model.prefill_line(*state, aims).at(cost_model.compute_s(state[1], num, length))
            for state, num in zip(states, lacking, strict=True)
        ]
    )
    assert costs.decode(known, length).tolist() == pytest.approx(
        [
            cost_model.decode_line(*state, aims).at(length) + cost_model.memory_cost(*state, aims, num)
            for state, num in zip(states, lacking, strict=True)
        ]
    )
    load_s = data.draw(st.floats(0, 10))
    options = [(worker, data.draw(st.integers(0, length)), load_s) for worker in reversed(cluster)]
    assert costs.loaded(options, length).tolist() == pytest.approx(
        [
            sum(cost_model.prompt_parts(*state, aims, length - num, length, load_s).values())
            for state, (_, num, _) in zip(reversed(states), options, strict=True)
        ]
    )
