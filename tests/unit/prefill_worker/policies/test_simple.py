"""Policies that judge each request by itself."""

from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Prefill
from tandem.prefill_worker.policies.simple import FirstComeFirstServed, LongestOutputFirst, RandomOrder
from tandem.prefill_worker.queued_request import QueuedRequest
from tandem.sampling_params import SamplingParams

CACHE = CacheManager(4, 2)


def queued(number: int, max_tokens: int = 4, num_outputs: int = 0) -> QueuedRequest:
    prefill = Prefill(f"r{number}", 0, (1, 2), (7,) * num_outputs, SamplingParams(max_tokens), "d")
    return QueuedRequest(prefill, number, [1, 2], 2)


def numbers(order: Sequence[QueuedRequest]) -> list[int]:
    return [q.number for q in order]


def test_first_come_first_served_keeps_the_order_of_age() -> None:
    queue = [queued(i) for i in range(5)]
    assert numbers(FirstComeFirstServed().order(queue, CACHE)) == [0, 1, 2, 3, 4]


def test_longest_output_counts_remaining_tokens() -> None:
    queue = [queued(0, 5), queued(1, 20, num_outputs=18), queued(2, 9), queued(3, 9)]
    assert numbers(LongestOutputFirst().order(queue, CACHE)) == [2, 3, 0, 1]


def test_random_order_is_reproducible_and_changes_every_step() -> None:
    queue = [queued(i) for i in range(20)]
    first, second = (
        [numbers(policy.order(queue, CACHE)) for _ in range(3)] for policy in (RandomOrder(), RandomOrder())
    )
    assert first == second
    assert len({tuple(order) for order in first}) == 3
    assert all(sorted(order) == list(range(20)) for order in first)
    assert numbers(RandomOrder(seed=1).order(queue, CACHE)) != first[0]
