"""The pair that has least left to do for this very request."""

import pytest

from router.policies.base import RequestEnd
from router.policies.cache_aware import CacheAware
from tests.fakes.routing import assign_load, make_candidates, routing_request


def test_a_prefix_goes_where_it_is_cached() -> None:
    policy, candidates = CacheAware(), make_candidates(3, 3)
    prompts = {name: [ord(name)] * 400 for name in "abc"}
    homes = {name: assign_load(policy.choose(candidates, routing_request(p)), 400) for name, p in prompts.items()}
    assert len({h.prefill.worker_id for h in homes.values()}) == 3
    for worker in (*(p.prefill for p in candidates), *(p.decode for p in candidates)):
        worker.num_assigned = worker.num_pending_tokens = 0
    for name, prompt in prompts.items():
        assert policy.choose(candidates, routing_request([*prompt, 7, 7, 7, 7])) == homes[name]


def test_a_cached_prefix_is_not_worth_a_long_queue() -> None:
    policy, candidates = CacheAware(), make_candidates(2, 1)
    request = routing_request(range(400))
    home = policy.choose(candidates, request)
    home.prefill.num_pending_tokens = 300
    assert policy.choose(candidates, request) == home
    home.prefill.num_pending_tokens = 500
    assert policy.choose(candidates, request) != home


def test_the_decode_worker_s_cache_counts_too() -> None:
    policy, candidates = CacheAware(), make_candidates(1, 2)
    first, second = candidates
    # It has cached the output too.
    policy.request_finished(second, routing_request(range(2000), output_ids=tuple(range(2000, 4000))), "finished")
    assert policy.choose(candidates, routing_request(range(4000))) == second
    second.decode.num_assigned = 100
    assert policy.choose(candidates, routing_request(range(4000))) == first


@pytest.mark.parametrize("end", ["stopped", "failed", "aborted"])
def test_what_did_not_come_to_its_end_is_not_taken_for_cached(end: RequestEnd) -> None:
    policy, candidates = CacheAware(), make_candidates(1, 2)
    policy.request_finished(candidates[1], routing_request(range(4000)), end)
    policy.request_finished(None, routing_request(range(4000)), "finished")
    candidates[1].decode.num_assigned = 1
    assert policy.choose(candidates, routing_request(range(4000))) == candidates[0]


def test_namespaces_do_not_attract_each_other() -> None:
    policy, candidates = CacheAware(), make_candidates(2, 1)
    one, two = (routing_request(range(400), cache_namespace=name) for name in ("one", "two"))
    home = policy.choose(candidates, one)
    home.prefill.num_pending_tokens = 10
    assert policy.choose(candidates, one) == home
    assert policy.choose(candidates, two) != home


def test_output_so_far_is_part_of_what_an_attempt_needs() -> None:
    policy, candidates = CacheAware(), make_candidates(2, 1)
    home = policy.choose(candidates, routing_request(range(400)))
    home.prefill.num_pending_tokens = 10
    again = routing_request(range(200), attempt=1, output_ids=tuple(range(200, 400)))
    assert policy.choose(candidates, again) == home
