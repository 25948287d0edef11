"""Fewest workers for a rate."""

from dataclasses import replace

import pytest

from tandem.deploy.config.bounds import Bounds
from tandem.deploy.supervise.capacities import Layout
from tandem.deploy.supervise.worker_needs import MeanRequest, WorkerNeeds
from tests.fakes.sized_cluster import AIMS, TIMES

PROMPT = 4096.0
REQUEST = MeanRequest(PROMPT, PROMPT**2 / 2, PROMPT, PROMPT**2 / 2, PROMPT, 256.0, 256.0, 800_000.0, 256.0)
ANY = {"any": Bounds(0, 1000)}
ROLES = {"prefill": Bounds(0, 1000), "decode": Bounds(0, 1000)}


def needs(request: MeanRequest = REQUEST) -> WorkerNeeds:
    return WorkerNeeds(TIMES, AIMS, request)


def test_many_workers_are_filled_better_than_one() -> None:
    """Bursts and queues even out: a worker alone serves 3.9 of the 6.4 requests a second that it takes from a queue."""
    served = needs().served(Layout(0, 0, 1))
    assert needs().fewest(0.5 * served, ANY) == {"any": 1}
    assert needs().fewest(0.95 * served, ANY) == {"any": 2}
    assert needs().fewest(95 * served, ANY)["any"] <= 105
    assert needs().served(Layout(0, 0, 10)) == pytest.approx(10 * served)
    assert needs().served(Layout(0, 0, 0)) == 0.0


def test_more_load_never_needs_fewer_workers() -> None:
    for bounds in (ANY, ROLES):
        counts = [sum(needs().fewest(0.5 * step, bounds).values()) for step in range(1, 60)]
        assert counts == sorted(counts)


def test_each_role_is_as_large_as_its_own_load() -> None:
    found = needs().fewest(30.0, ROLES)
    longer = needs(replace(REQUEST, output=2048.0, steps=2048.0)).fewest(30.0, ROLES)
    assert longer["prefill"] == found["prefill"] and longer["decode"] > found["decode"]
    cached = needs(replace(REQUEST, tokens=400.0, elsewhere=400.0, attended=1e5, elsewhere_attended=1e5))
    assert cached.fewest(30.0, ROLES) == {"prefill": 1, "decode": found["decode"]}


def test_speculation_decodes_with_fewer_workers() -> None:
    long = replace(REQUEST, output=2048.0, steps=2048.0)
    plain, speculating = (needs(request).fewest(30.0, ROLES) for request in (long, replace(long, steps=1024.0)))
    assert speculating["prefill"] == plain["prefill"] and speculating["decode"] < plain["decode"]


def test_pools_limit_what_a_worker_decodes() -> None:
    small = needs(replace(REQUEST, pool_tokens=50_000.0)).fewest(10.0, ROLES)
    assert small["decode"] > needs().fewest(10.0, ROLES)["decode"]


def test_workers_that_do_both_help_fixed_roles() -> None:
    bounds = {"prefill": Bounds(1, 1), "decode": Bounds(1, 1), "both": Bounds(0, 20)}
    assert needs().fewest(1.0, bounds) == {"prefill": 1, "decode": 1, "both": 0}
    assert needs().fewest(30.0, bounds)["both"] > 1


def test_one_pair_serves_what_is_unknown() -> None:
    unknown = needs(MeanRequest(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert unknown.fewest(5.0, ANY) == {"any": 1}
    assert unknown.fewest(5.0, ROLES) == {"prefill": 1, "decode": 1}
    assert unknown.fewest(5.0, {"both": Bounds(0, 3)}) == {"both": 1}
    assert needs().fewest(0.0, {"any": Bounds(0, 0)}) == {"any": 0}
