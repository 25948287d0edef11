"""All decode workers die and return one by one: waiting requests spread over them, oldest first, and all finish."""

from collections import Counter

import pytest

from tandem.router.waiting_room import MAX_STARTING
from tests.fakes.simulation.cluster import Simulation

NUM_BEFORE, NUM_AFTER = 12, 90
# Turns between two workers' returns: a few steps of the returned workers.
NUM_TURNS = 12


def turn(simulation: Simulation, count: int) -> None:
    for _ in range(count):
        simulation.go_on()
        for router in simulation.routers.values():
            for worker in router.router.workers:
                # A worker never gets more waiting requests than it can start.
                assert worker.num_starting <= MAX_STARTING


def submit(simulation: Simulation, count: int) -> None:
    for number in range(count):
        simulation.submit([1 + number % 7, 2, 3], max_tokens=6, router=number)


def kill_all_decode_workers(simulation: Simulation) -> None:
    for worker in [worker for worker in simulation.workers.values() if worker.role == "decode"]:
        streams = list(worker.streams.values())
        simulation.kill(worker)
        for stream in streams:
            while stream.to_router:
                stream.deliver_to_router()


@pytest.mark.parametrize("num_routers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("routing", ["round_robin", "least_loaded", "power_of_two", "cache_aware", "least_cost"])
def test_returning_workers_share_the_waiting_requests(routing: str, num_routers: int) -> None:
    simulation = Simulation(
        2, 3, num_pages=10, prefill_policy="fcfs", routing=routing, two_sided=False, num_routers=num_routers
    )
    routers = [router.router for router in simulation.routers.values()]
    submit(simulation, NUM_BEFORE)
    turn(simulation, 10)
    assert sum(router.num_requests for router in routers) > NUM_BEFORE // 2, "too many have finished for this test"
    kill_all_decode_workers(simulation)
    assert [router.not_ready_reason() for router in routers] == ["no decode worker is connected"] * num_routers
    submit(simulation, NUM_AFTER)
    num_waiting = [sum(router.num_waiting for router in routers)]
    assert num_waiting[0] == sum(router.num_requests for router in routers)
    for worker in list(simulation.dead):
        simulation.revive(worker)
        turn(simulation, NUM_TURNS)
        num_waiting.append(sum(router.num_waiting for router in routers))
    # Neither the first returned worker nor the first two took everything.
    assert num_waiting == sorted(num_waiting, reverse=True) and num_waiting[2] > MAX_STARTING
    simulation.drain()
    simulation.check_end()
    late = simulation.clients[NUM_BEFORE:]
    served_by = Counter(client.last.handover.decode_worker for client in late if client.last is not None)
    assert served_by.total() == NUM_AFTER
    assert len(served_by) == 3 and min(served_by.values()) >= NUM_AFTER // 6, served_by
    for router in simulation.routers.values():
        # None of these counts as a failed attempt.
        assert router.policy.failures.keys() <= {"worker_lost", "given_back", "deferred"}
        # Request numbers grow with age, and late requests follow the earlier ones.
        begun = [int(request_id.rpartition("-")[2]) for request_id, attempt in router.policy.starts if attempt == 0]
        begun = [number for number in begun if number >= NUM_BEFORE // num_routers]
        assert begun == sorted(begun) and len(begun) == NUM_AFTER // num_routers
