"""A supervisor takes over a running cluster, on a fake Ray."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem import watched_files
from tandem.deploy import launcher
from tandem.deploy.config.bounds import Bounds, SizedKind
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.ports import ClientAddresses, ClusterPorts
from tandem.deploy.launcher import Cluster, ClusterState
from tandem.deploy.plan import plan
from tandem.deploy.supervise import processes
from tandem.deploy.supervise.processes import Processes
from tandem.key_file import KeyFile
from tandem.router.config import RouterAddresses, RouterConfig
from tests.fakes.model_config import TINY_LLAMA

NAMES = ("router-0", "router-1", "both-0")
CONFIG = ClusterConfig("m", ray_address="127.0.0.1:1", num_prefill=0, num_decode=0, num_both=1, num_routers=2)


class FakeRay:
    """References are the answers themselves."""

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def get(self, ref: Any, timeout: float = 0.0) -> Any:
        return ref

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert 0 < num_returns <= len(refs), "as Ray has it"
        return refs, []

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class FakeActor:
    """A ready process; records the workers told to routers."""

    def __init__(self) -> None:
        self.planned: list[dict[str, str]] = []
        self.num_looks = 0

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Callable[..., Any]] = {
            "progress": lambda: "ready",
            "open_shared_ports": lambda: None,
            "set_workers": self._set_workers,
            "drain": lambda timeout_s: 1,
            "look_at_files": self._look_at_files,
        }
        return SimpleNamespace(remote=answers[name])

    def _set_workers(self, planned: dict[str, str]) -> dict[str, int]:
        self.planned.append(planned)
        return {}

    def _look_at_files(self) -> None:
        self.num_looks += 1


class FakeHosted:
    """Attributes: running: by name; ended: ended actors; saved: last note."""

    def __init__(self, running: Iterable[str]) -> None:
        self.running = {name: FakeActor() for name in running}
        self.ended: list[str] = []
        self.saved: ClusterState | None = None

    def find_actors(self) -> dict[str, dict[int, Any]]:
        return {name: {0: actor} for name, actor in self.running.items()}

    def end_all(self, besides: Iterable[Any] = ()) -> None:
        kept = list(besides)
        self.ended += [name for name, actor in self.running.items() if actor not in kept]

    def save(self, name: str, note: ClusterState) -> None:
        self.saved = note


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setattr(launcher, "ray", ray)
    monkeypatch.setattr(processes, "ray", ray)
    monkeypatch.setattr(launcher, "resolve_model", lambda *_, **__: Path("/m"))
    return ray


def recovered(
    hosted: FakeHosted,
    tmp_path: Path,
    *,
    has_started: bool = True,
    drains_until: float | None = None,
    config: ClusterConfig = CONFIG,
    bounds: dict[SizedKind, Bounds] | None = None,
) -> Cluster:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "tokenizer.json").write_text("{}")
    own = {name: RouterAddresses(*(f"127.0.0.1:{n}" for n in (1, 2, 3))) for name in NAMES[:2]}
    ports = ClusterPorts(ClientAddresses("127.0.0.1:1", "127.0.0.1:2"), own)
    routers, workers = plan(config, tmp_path, "a-secret", ports)
    cluster = Cluster(config, lambda part, doing: None, hosted=hosted)  # type: ignore[arg-type]
    cluster._ports.reserve_again = lambda ports: None  # type: ignore[method-assign]
    state = ClusterState(
        "a-secret",
        None,
        tmp_path,
        ports,
        {c.router_id: c for c in routers},
        {p.worker.worker_id: p for p in workers},
        dict.fromkeys(NAMES, 1),
        None,
        {},
        has_started,
        drains_until,
        list(NAMES[:2]),
        bounds or {},
        {"both": 7.0},
    )
    assert "a-secret" not in repr(state)
    cluster.recover(state)
    return cluster


def test_what_takes_part_goes_on(ray: FakeRay, tmp_path: Path) -> None:
    hosted = FakeHosted(NAMES)
    cluster = recovered(hosted, tmp_path, bounds={"both": Bounds(0, 3)})
    assert all(cluster.actor(name) is hosted.running[name] for name in NAMES)
    cluster.begin_drain()
    assert hosted.saved is not None
    assert (hosted.saved.bounds, hosted.saved.start_s) == ({"both": Bounds(0, 3)}, {"both": 7.0}), "for the next life"
    assert hosted.ended == ray.killed == []


def test_a_router_that_is_not_back_yet_is_no_obstacle_to_a_change_or_to_a_stop(tmp_path: Path) -> None:
    """It may wait for its node forever."""
    hosted = FakeHosted(("router-0", "both-0"))
    cluster = recovered(hosted, tmp_path)
    cluster._processes.tell_routers(["both-0"])
    assert hosted.running["router-0"].planned[-1] == {"both-0": "both"}
    assert cluster.drain(0.0) == 1
    nobody = recovered(FakeHosted(("both-0",)), tmp_path)
    assert nobody._processes.tell_routers(["both-0"]) == [] and nobody.drain(0.0) == 0


def test_a_drain_has_the_time_that_it_had_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(launcher.time, "time", lambda: now)
    hosted = FakeHosted(NAMES)
    cluster = recovered(hosted, tmp_path)
    assert not cluster.is_draining
    assert cluster.begin_drain() == CONFIG.drain_timeout_s
    assert hosted.saved is not None and cluster.is_draining
    now += CONFIG.drain_timeout_s / 2
    until = hosted.saved.drains_until
    for supervised in (cluster, recovered(hosted, tmp_path, drains_until=until)):
        assert supervised.is_draining and supervised.begin_drain() == CONFIG.drain_timeout_s / 2
    now -= 1e6
    assert cluster.begin_drain() == CONFIG.drain_timeout_s, "another host's clock adds nothing"


def test_a_start_that_was_cut_short_is_made_again_before_it_counts_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = FakeHosted(NAMES)
    started: list[str] = []
    monkeypatch.setattr(Processes, "start_router", lambda self, name: started.append(name) or name)
    monkeypatch.setattr(Processes, "start_worker", lambda self, name: started.append(name) or name)

    def wait_for(self: Processes, refs: dict[Any, str]) -> None:
        assert hosted.saved is None or not hosted.saved.has_started
        self.actors |= {name: FakeActor() for name in started}

    monkeypatch.setattr(Processes, "wait_for", wait_for)
    monkeypatch.setattr(Processes, "join_worker", lambda self, actor: "joined")
    cluster = recovered(hosted, tmp_path, has_started=False)
    assert sorted(hosted.ended) == sorted(started) == sorted(NAMES)
    assert hosted.saved is not None and hosted.saved.has_started and cluster.actor("both-0") is not None


def test_a_process_that_starts_again_without_the_key_file_gets_the_newest_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "WATCH_INTERVAL_S", 0.01)
    path = tmp_path / "keys"
    path.write_text("first\n")
    config = replace(CONFIG, api_keys=("flag", "first"), key_file=KeyFile(str(path), ("flag",)))
    hosted = FakeHosted(NAMES)
    cluster = recovered(hosted, tmp_path, config=config)
    started: list[tuple[str, ...]] = []

    def create(_: Any, given: Any) -> Any:
        started.append((given if isinstance(given, RouterConfig) else given.worker).api_keys)
        return SimpleNamespace(start=SimpleNamespace(remote=lambda: None))

    class FakeSupervisor:
        def __init__(self, *_: Any) -> None:
            pass

        def run(self, stop: threading.Event, take_turn: Callable[[], None]) -> None:
            path.write_text("second\n")
            deadline = time.monotonic() + 20.0
            while cluster._processes.router_configs["router-1"].api_keys != ("flag", "second"):
                assert time.monotonic() < deadline, "the revoked key comes back"
                time.sleep(0.01)
                take_turn()
            path.unlink()
            time.sleep(0.1)
            take_turn()
            for start in (cluster._processes.start_router, cluster._processes.start_worker):
                start("router-0" if not started else "both-0")

    monkeypatch.setattr(launcher, "Supervisor", FakeSupervisor)
    monkeypatch.setattr(Processes, "_actor_class", lambda *_: None)
    hosted.create = create  # type: ignore[attr-defined]
    cluster.supervise(threading.Event())
    assert started == [("flag", "second")] * 2
    assert hosted.saved is not None
    assert {c.api_keys for c in hosted.saved.router_configs.values()} == {("flag", "second")}


def test_each_order_makes_the_routers_look_at_their_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = FakeHosted(NAMES)
    cluster = recovered(hosted, tmp_path)
    seen: list[list[int]] = []

    class FakeSupervisor:
        def __init__(self, *_: Any) -> None:
            pass

        def run(self, stop: threading.Event, take_turn: Callable[[], None]) -> None:
            for must_look in (False, True, False, True):
                if must_look:
                    cluster.look_at_files()
                take_turn()
                seen.append([hosted.running[name].num_looks for name in NAMES])

    monkeypatch.setattr(launcher, "Supervisor", FakeSupervisor)
    cluster.supervise(threading.Event())
    assert seen == [[0, 0, 0], [1, 1, 0], [1, 1, 0], [2, 2, 0]]
