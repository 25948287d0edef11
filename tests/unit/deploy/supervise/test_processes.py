"""Questions to a cluster's processes, on a fake Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.errors import ConfigurationError
from tandem.deploy.on_ray.ray_module import RayActorError, RayError, RayTaskError
from tandem.deploy.supervise import processes
from tandem.deploy.supervise.processes import Processes


class Method:
    """An actor's method."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Router:
    """Attributes: kept: request lines; num_left: running requests."""

    def __init__(self, kept: list[str], num_left: int) -> None:
        self.kept = kept
        self.drain = Method(lambda timeout_s: num_left)
        self.probe = Method(self._probe)

    def _probe(self) -> list[str]:
        lines, self.kept = self.kept, []
        return lines


def failing() -> Any:
    router = Router([], 0)
    router.probe = Method(lambda: RayError())
    return router


def get(ref: Any) -> Any:
    if isinstance(ref, Exception):
        raise ref
    return ref


@pytest.mark.parametrize("keeps", [True, False])
def test_a_drain_shows_the_lines_of_requests_that_end_in_it(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ray", SimpleNamespace(wait=lambda refs, **_: (refs, []), get=get))
    shown: list[str] = []
    unused: Any = None
    cluster = Processes(unused, unused, unused, shown.append, unused)
    cluster.actors = {"router-0": Router(["a", "b"], 2), "router-1": failing()}
    config: Any = SimpleNamespace(keeps_request_lines=keeps)
    # After a takeover, a missing router is not asked.
    cluster.router_configs = dict.fromkeys(("router-0", "router-1", "router-2"), config)
    cluster.routers = list(cluster.router_configs)
    assert cluster.drain(1.0) == 2
    assert shown == (["a", "b"] if keeps else [])


@pytest.mark.parametrize(
    ("workers_per_gpu", "num_ranks", "num_gpus"), [(1, 1, 1.0), (2, 1, 0.5), (3, 1, 0.3333), (1, 4, 4.0), (2, 2, 1.0)]
)
def test_a_worker_takes_the_gpus_and_cpus_of_its_ranks(
    workers_per_gpu: int, num_ranks: int, num_gpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    actor = SimpleNamespace(start=Method(lambda: None))
    actor_class = SimpleNamespace(options=lambda **options: asked.append(options))
    monkeypatch.setattr(processes, "ray", SimpleNamespace(remote=lambda cls: actor_class))
    ray_in_use: Any = SimpleNamespace(
        actor_options=lambda: {"num_cpus": 1}, naming=lambda name: {}, create=lambda cls, plan: actor
    )
    config = ClusterConfig("m", device="cuda", workers_per_gpu=workers_per_gpu, decode_tp=num_ranks, num_pages=8)
    cluster = Processes(config, ray_in_use, lambda part, doing: None, print, lambda: None)
    cluster.router_configs = {"router-0": config.router("m", "m", 9)}
    cluster.worker_plans = {"decode-0": config.worker("decode-0", "decode", config.engine("m"), 9)}
    cluster.start_worker("decode-0")
    assert [(options["num_gpus"], options["num_cpus"]) for options in asked] == [(num_gpus, num_ranks)]


class Call:
    """Attributes: result: of the call; None: not ended."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.is_read = False


class CallsOfRay:
    """Args: starts: ended by a kill of their actor, by its name."""

    def __init__(self, starts: dict[str, Call]) -> None:
        self._starts = starts

    def wait(self, refs: list[Call], *, num_returns: int, **_: Any) -> tuple[list[Call], list[Call]]:
        ended = [ref for ref in refs if ref.result is not None][:num_returns]
        return ended, [ref for ref in refs if ref not in ended]

    def get(self, ref: Call, timeout: float = 0.0) -> Any:
        ref.is_read = True
        if isinstance(ref.result, Exception):
            raise ref.result
        return ref.result

    def kill(self, actor: Any) -> None:
        call = self._starts[actor.name]
        call.result = call.result or RayActorError()


@pytest.mark.parametrize("fails_too", [True, False])
def test_all_starts_are_read_after_one_has_failed(fails_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would log the traceback of another failure."""
    failure = RayTaskError("start", "", ValueError("corrupt weights"))
    starts = {"prefill-0": Call(failure), "decode-0": Call(), "router-0": Call("ready")}
    monkeypatch.setattr(processes, "ray", CallsOfRay(starts))
    unused: Any = None
    cluster = Processes(ClusterConfig("m"), unused, lambda part, doing: None, print, unused)
    cluster.worker_plans = dict.fromkeys(("prefill-0", "decode-0"), unused)
    cluster.router_configs, cluster.routers = {"router-0": unused}, ["router-0"]
    for name in starts:
        stop, progress = Method(lambda: Call([])), Method(lambda: Call("loading"))
        cluster.actors[name] = SimpleNamespace(name=name, stop=stop, progress=progress)
    monkeypatch.setattr(cluster, "start_worker", starts.__getitem__)
    monkeypatch.setattr(cluster, "start_router", starts.__getitem__)
    with pytest.raises(ConfigurationError, match=r"^prefill-0: corrupt weights$"):
        cluster.start_all()
    if fails_too:
        starts["decode-0"].result = failure
    cluster.stop()
    assert all(start.is_read for start in starts.values())
