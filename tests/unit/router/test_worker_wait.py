"""The wait for workers outlasts a hung worker and its successor's start."""

from typing import Any, cast

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.router.worker_wait import DETECTION_S, MAX_WAIT_S, START_MARGIN_S, UNKNOWN_START_S, WorkerWait


def test_configured_limit_holds() -> None:
    for configured_s in (0.0, 12.0):
        wait = WorkerWait(configured_s)
        wait.note_start("p", 500.0)
        assert wait.limit_s == configured_s


def test_derived_limit_follows_the_longest_start() -> None:
    wait = WorkerWait(-1.0)
    assert wait.limit_s == DETECTION_S + 1.5 * UNKNOWN_START_S + START_MARGIN_S
    wait.note_start("p", 4.0)
    wait.note_start("d", 100.0)
    assert wait.limit_s == DETECTION_S + 150.0 + START_MARGIN_S
    # Its next life loads faster.
    wait.note_start("d", 8.0)
    assert wait.limit_s == DETECTION_S + 12.0 + START_MARGIN_S
    wait.note_start("d", 1e6)
    assert wait.limit_s == MAX_WAIT_S


def test_derived_limit_exceeds_what_the_supervisor_needs() -> None:
    from tandem.deploy.supervise import processes, supervisor

    own: Any = processes.Processes(ClusterConfig("m"), cast(Any, None), print, print, lambda: None)
    _, worker = own.kinds()
    worst_s = worker.silence_limit_s + worker.probe_interval_s + supervisor.POLL_INTERVAL_S + supervisor.RESTART_DELAY_S
    assert worst_s < DETECTION_S
