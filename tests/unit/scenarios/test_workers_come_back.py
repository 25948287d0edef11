"""All decode workers die at once and come back one by one: what waits meanwhile is spread over them, oldest first, and
every client gets its tokens."""

from collections import Counter

import pytest

from router.waiting_room import MAX_STARTING
from tests.fakes.simulation import Simulation

NUM_BEFORE, NUM_AFTER = 12, 90
# So many turns of everything lie between two workers' returns: a few steps of those that are back.
NUM_TURNS = 12


def turn(simulation: Simulation, count: int) -> None:
    for _ in range(count):
        for action in simulation.progress_actions():
            action()
        simulation.read_clients()
        for worker in simulation.router.workers:
            # One that takes from the waiting room is never given more than it gets going.
            assert worker.num_starting <= MAX_STARTING


def submit(simulation: Simulation, count: int) -> None:
    for number in range(count):
        simulation.submit([1 + number % 7, 2, 3], max_tokens=6)


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded", "power_of_two", "cache_aware"])
def test_workers_that_come_back_one_by_one_share_what_waits(routing: str) -> None:
    simulation = Simulation(2, 3, num_pages=10, prefill_policy="fcfs", routing=routing, two_sided=False)
    submit(simulation, NUM_BEFORE)
    turn(simulation, 10)
    assert simulation.router.num_requests > NUM_BEFORE // 2, "too many have finished for this test"
    for worker_id in ("decode0", "decode1", "decode2"):
        simulation.kill(simulation.workers[worker_id])
    assert simulation.router.not_ready_reason() == "no decode worker is connected"
    submit(simulation, NUM_AFTER)
    num_waiting = [simulation.router.num_waiting]
    assert num_waiting[0] == simulation.router.num_requests
    for worker in list(simulation.dead):
        simulation.revive(worker)
        turn(simulation, NUM_TURNS)
        num_waiting.append(simulation.router.num_waiting)
    # The first one back did not take all, nor did the first two.
    assert num_waiting == sorted(num_waiting, reverse=True) and num_waiting[2] > MAX_STARTING
    simulation.drain()
    simulation.check_end()
    late = simulation.clients[NUM_BEFORE:]
    served_by = Counter(client.request.tracker.decode_worker_id for client in late)
    assert len(served_by) == 3 and min(served_by.values()) >= NUM_AFTER // 6, served_by
    assert [client.request.num_failures for client in simulation.clients] == [0] * (NUM_BEFORE + NUM_AFTER)
    # No number grows with every attempt: none of the late ones was started twice for want of a worker.
    begun = [client.request.tracker.moments["assigned"] for client in late if client.request.tracker.attempt == 0]
    assert begun == sorted(begun) and len(begun) > NUM_AFTER // 2
