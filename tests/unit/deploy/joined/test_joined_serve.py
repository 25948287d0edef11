"""`tandem serve` on an existing Ray, with a fake cluster."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from tandem.deploy.joined import joined_serve
from tandem.deploy.joined.joined_serve import _Watch
from tandem.deploy.joined.remote_cluster import GoneError
from tandem.deploy.joined.supervisor_actor import SERVING, STARTING, SupervisorState

LOADING = SupervisorState("1", STARTING, {"both-0": "loading"}, [], 0, "", "", {}, "", "", False)
READY = replace(LOADING, phase=SERVING, grpc="127.0.0.1:1", http="127.0.0.1:2", model_name="m")


class FakeCluster:
    """Returns these states one by one, then is gone."""

    def __init__(self, *states: SupervisorState | None) -> None:
        self._states = list(states)

    def look(self) -> SupervisorState | None:
        if not self._states:
            raise GoneError("chat")
        return self._states.pop(0)


def start(*states: SupervisorState | None) -> int | None:
    cluster: Any = FakeCluster(*states)
    return _Watch(cluster, Console(), threading.Event(), 1.0).start()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_serve, "POLL_INTERVAL_S", 0.0)


def test_warnings_of_the_start_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(None, replace(LOADING, lines=["WARNING: the key travels in the clear"]), READY) is None
    said = capsys.readouterr().out
    assert "WARNING: the key travels in the clear" in said and "Ready after" in said


def test_a_starting_cluster_may_be_stopped_by_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(LOADING) == 0
    assert "The cluster was stopped" in capsys.readouterr().out


def test_a_supervisor_that_never_answers_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(None) == 1
    assert capsys.readouterr().err.startswith("tandem: the cluster's supervisor has ended before it said anything")
