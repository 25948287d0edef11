from tandem.router.workers.peer_counts import NOTHING, AssignedLoad
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.scripted_worker import hello


def test_restarted_worker_is_another_object() -> None:
    lives = [Worker(hello("d0", "decode", life=life), lambda _: None, lambda _: None, 0.0, 0.0) for life in ("1", "2")]
    assert {worker.worker_id for worker in lives} == {"d0"}
    assert lives[0] != lives[1] and lives[0].incarnation != lives[1].incarnation
    assert Pair(lives[0], lives[0]) == Pair(lives[0], lives[0]) != Pair(lives[0], lives[1])


def test_load_sums_all_routers() -> None:
    worker = Worker(hello("p", "prefill"), lambda _: None, lambda _: None, 0.0, 0.0)
    worker.add_load(1, 100)
    worker.set_load_elsewhere(AssignedLoad(4, 1000))
    worker.add_load(1, 10)
    assert (worker.num_assigned, worker.num_pending_tokens, worker.assigned_here) == (6, 1110, AssignedLoad(2, 110))
    worker.set_load_elsewhere(AssignedLoad(1, 0))
    worker.add_load(-2, -110)
    assert (worker.num_assigned, worker.num_pending_tokens, worker.assigned_here) == (1, 0, NOTHING)
