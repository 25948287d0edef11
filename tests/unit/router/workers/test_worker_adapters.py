"""Waits for adapters, as routers expect them."""

from typing import Any

import pytest

from tandem.messages import AdapterPlaces
from tandem.router.policies.cache_aware import CacheAware
from tandem.router.policies.least_cost import LeastCost
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.workers.worker_adapters import UNDER_WAY_S, WorkerAdapters
from tests.fakes.routing import assign_load, make_candidates, routing_request
from tests.fakes.scripted_adapters import make_ref

REF = make_ref("a")


def test_the_nearer_an_adapter_the_shorter_the_wait() -> None:
    adapters = WorkerAdapters()
    assert adapters.wait_s(None) == 0.0
    on_disk = adapters.wait_s(REF)
    adapters.expect(REF, 0.0)
    loading = adapters.wait_s(REF)
    adapters.receive(AdapterPlaces((), ("a",)))
    in_host = adapters.wait_s(REF)
    adapters.receive(AdapterPlaces(("a",), ()))
    assert on_disk > loading > 0.0 == adapters.wait_s(REF)
    assert on_disk > in_host > 0.0


def test_the_measured_rate_counts() -> None:
    adapters = WorkerAdapters()
    adapters.receive(AdapterPlaces((), (), load_byte_s=1e-6))
    assert adapters.wait_s(REF) > REF.num_bytes * 1e-6


def test_a_load_that_nobody_reports_is_not_under_way_for_ever() -> None:
    adapters = WorkerAdapters()
    before = adapters.wait_s(REF)
    adapters.expect(REF, 0.0)
    adapters.expect(make_ref("b"), UNDER_WAY_S + 1.0)
    assert adapters.wait_s(REF) == before


@pytest.mark.parametrize("policy", [LeastLoaded, LeastCost, CacheAware])
def test_policies_prefer_workers_that_have_the_adapter_until_they_are_busy(policy: Any) -> None:
    candidates = make_candidates(3, 3)
    having = candidates.prefill_workers[1], candidates.receivers()[2]
    for worker in having:
        worker.adapters.receive(AdapterPlaces(("a",), ()))
    request = routing_request(adapter=REF)
    for seed in range(5):
        pair = policy(seed=seed).choose(candidates, request)
        assert (pair.prefill, pair.decode) == having
    for _ in range(40):
        assign_load(pair, 400)
    pair = policy(seed=1).choose(candidates, request)
    assert pair.prefill is not having[0]
