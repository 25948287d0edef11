"""A worker's start, with a fake GPU and a fake process."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.actors import worker_actor
from tandem.deploy.actors.worker_actor import WorkerActor
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.gpu_turn import GpuTurn
from tandem.worker.config import StoreAccess

GPU = "0000:C1:00.0"


class FakeOpening:
    """Takes the turn at once, as a real one does on its thread."""

    def __init__(self, turn: GpuTurn | None) -> None:
        if turn is not None:
            turn.take(GPU)

    def wait(self) -> None:
        pass


class FakeProcess:
    def __init__(self, directory: Path, error: Exception | None = None) -> None:
        self.is_alone: bool | None = None
        self._directory = directory
        self._error = error

    def start(self) -> None:
        self.is_alone = not is_free(self._directory)
        if self._error is not None:
            raise self._error


def is_free(directory: Path) -> bool:
    """Whether another worker could start on the GPU."""
    with GpuTurn(directory, lambda: None, timeout_s=0.0) as turn:
        try:
            turn.take(GPU)
        except TimeoutError:
            return False
    return True


@pytest.mark.parametrize("error", [None, ValueError("the model is too large")])
@pytest.mark.parametrize(("workers_per_gpu", "is_alone"), [(1, False), (2, True)])
def test_a_worker_that_shares_its_gpu_starts_alone(
    workers_per_gpu: int, is_alone: bool, error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = FakeProcess(tmp_path, error)
    roles = SimpleNamespace(worker_process=lambda plan, on_progress: process)
    monkeypatch.setitem(sys.modules, "tandem.deploy.actors.worker_roles", roles)
    monkeypatch.setattr(worker_actor, "GpuOpening", FakeOpening)
    monkeypatch.setattr(worker_actor, "default_directory", lambda: tmp_path)
    for name in ("freeze_objects", "collect_seldom"):
        monkeypatch.setattr(worker_actor, name, lambda: None)
    monkeypatch.setattr(worker_actor.logs, "configure", lambda *_: None)
    config = ClusterConfig("m", device="cuda", workers_per_gpu=workers_per_gpu)
    actor: Any = WorkerActor(config.worker("decode-0", "decode", config.engine("m"), 9))
    if error is None:
        actor.start()
    else:
        with pytest.raises(ValueError, match="too large"):
            actor.start()
    assert process.is_alone == is_alone and is_free(tmp_path)


@pytest.mark.parametrize(("node", "has_store"), [("10.0.0.1", True), ("10.0.0.3", False)])
def test_a_worker_uses_the_page_store_of_the_node_where_it_starts(
    node: str, has_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = FakeProcess(tmp_path)
    plans = []
    roles = SimpleNamespace(worker_process=lambda plan, on_progress: plans.append(plan) or process)
    monkeypatch.setitem(sys.modules, "tandem.deploy.actors.worker_roles", roles)
    monkeypatch.setattr(worker_actor, "default_directory", lambda: tmp_path)
    monkeypatch.setattr(worker_actor, "own_address", lambda: node)
    monkeypatch.setattr(worker_actor, "own_rack", lambda: "rack")
    for name in ("freeze_objects", "collect_seldom"):
        monkeypatch.setattr(worker_actor, name, lambda: None)
    monkeypatch.setattr(worker_actor.logs, "configure", lambda *_: None)
    config = ClusterConfig("m", ray_address="127.0.0.1:1", placement_strategy="spread", store_memory="1GiB")
    stores = {f"10.0.0.{i}": StoreAccess(f"10.0.0.{i}:9", "/socket") for i in (1, 2)}
    actor: Any = WorkerActor(replace(config.worker("both-0", "both", config.engine("m"), 9), stores=stores))
    with caplog.at_level(logging.WARNING):
        actor.start()
    (plan,) = plans
    assert (plan.worker.host, plan.worker.rack, plan.worker.store) == (node, "rack", stores.get(node))
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if has_store else ["the node 10.0.0.3 has no page store, serving without one"])
