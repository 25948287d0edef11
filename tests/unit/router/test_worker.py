"""A worker as the router knows it."""

from router.worker import Pair, Worker
from tests.fakes.scripted_worker import hello


def test_a_worker_started_again_is_another_of_the_same_name() -> None:
    lives = [Worker(hello("d0", "decode", life=life), lambda _: None, lambda _: None, 0.0, 0.0) for life in ("1", "2")]
    assert {worker.worker_id for worker in lives} == {"d0"}
    assert lives[0] != lives[1] and lives[0].incarnation != lives[1].incarnation
    assert Pair(lives[0], lives[0]) == Pair(lives[0], lives[0]) != Pair(lives[0], lives[1])
