"""The stores of several nodes, with fakes of Ray and of the regions' keepers."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.nodes.region_keeper import RegionKeeper, RegionOrder
from tandem.deploy.on_ray.codec import decode, encode
from tandem.deploy.on_ray.ray_module import RayError
from tandem.deploy.on_ray.sealed import seal
from tandem.deploy.supervise import node_stores
from tandem.deploy.supervise.node_stores import NodeStores, SavedStore

CONFIG = ClusterConfig(
    "m",
    ray_address="127.0.0.1:1",
    placement_strategy="spread",
    store_memory="1MiB",
    store_disk="/d:1GiB",
    store_write_after=2,
)
NODES = {"10.0.0.1": "10.1.0.1", "10.0.0.2": "10.1.0.2"}
ROUTERS = ["10.1.0.1:98"]


class FakeKeeper:
    """Attributes: is_dead: calls fail."""

    def __init__(self, ray: "FakeRay", name: str, order: RegionOrder) -> None:
        self.ray, self.name, self.order = ray, name, order
        self.is_dead = self.is_stopped = False
        node = name.removeprefix("region-").rpartition(".")[0]
        host = order.address.rpartition(":")[0]
        address = order.address if not order.address.endswith(":0") else f"{host}:7"
        kept = (address, f"/socket of {node}", f"rack of {node}", ray.folders.get(node, node))
        self.start = self._call(lambda: ray.refusal or kept)
        self.wait_ended = self._call(lambda: self)
        self.num_untouched_bytes = self._call(lambda: 100)
        self.namespace_secret = self._call(lambda key: seal(b"secret", key))
        self.stop = self._call(lambda: setattr(self, "is_stopped", True))

    def _call(self, answer: Any) -> Any:
        return SimpleNamespace(remote=lambda *args: RayError("dead") if self.is_dead else answer(*args))


@dataclass
class FakeRay:
    """References are answers or errors. Attributes: actors: by name; folders: by node; refusal: of every start."""

    actors: dict[str, FakeKeeper] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    folders: dict[str, str] = field(default_factory=dict)
    refusal: Exception | None = None

    def remote(self, kind: type) -> Any:
        assert kind is RegionKeeper
        return self

    def options(self, **options: Any) -> Any:
        assert options["num_cpus"] == 0 and options["max_restarts"] == 0
        (resource,) = options["resources"]
        assert options["name"].startswith(f"region-{resource.removeprefix('node:')}.")
        return options["name"]

    def naming(self, name: str) -> dict[str, Any]:
        return {"name": name}

    def create(self, name: Any, order: Any) -> FakeKeeper:
        assert name not in self.actors, "Ray frees the name of a dead actor late"
        self.actors[name] = FakeKeeper(self, name, order)
        return self.actors[name]

    def find_actors(self) -> dict[str, dict[int, Any]]:
        found: dict[str, dict[int, Any]] = {}
        for name, actor in self.actors.items():
            if not actor.is_dead:
                base, _, life = name.rpartition(".")
                found.setdefault(base, {})[int(life)] = actor
        return found

    def wait(self, refs: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        ended = [ref for ref in refs if not isinstance(ref, FakeKeeper) or ref.is_dead]
        return ended[:num_returns], []

    def get(self, ref: Any, timeout: float) -> Any:
        if isinstance(ref, Exception):
            raise ref
        return ref

    def kill(self, actor: FakeKeeper) -> None:
        self.killed.append(actor.name)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(node_stores, "ray", fake)
    return fake


def opened(ray: Any, config: ClusterConfig = CONFIG) -> NodeStores:
    stores = NodeStores(ray)
    assert stores.open_on(NODES, config, ROUTERS, "token") == ("secret" if config.store_disk else "")
    return stores


def test_each_node_has_a_store_at_its_address(ray: FakeRay) -> None:
    stores = opened(ray)
    assert stores.access is None
    first, second = stores.configs["store-0"], stores.configs["store-1"]
    assert (first.host, second.host, second.port, second.rack) == ("10.1.0.1", "10.1.0.2", 7, "rack of 10.0.0.2")
    assert first.namespace_secret == second.namespace_secret == "secret"
    assert second.routers == ("10.1.0.1:98",) and second.cluster_token == "token"
    access = stores.access_by_node["10.0.0.2"]
    assert (access.address, access.region_socket, access.write_after) == ("10.1.0.2:7", "/socket of 10.0.0.2", 2)
    assert stores.untouched_bytes == 200
    # The first node's folder decides.
    secrets = {name: actor.order.namespace_secret for name, actor in ray.actors.items()}
    assert secrets == {"region-10.0.0.1.0": "", "region-10.0.0.2.0": "secret"}
    stores.close()
    assert all(actor.is_stopped for actor in ray.actors.values()) and ray.killed == [*ray.actors]


def test_a_cluster_on_one_host_gives_all_workers_its_store(ray: FakeRay) -> None:
    config = ClusterConfig("m", ray_address="127.0.0.1:1", store_memory="1MiB")
    stores: Any = NodeStores(ray)  # type: ignore[arg-type]
    stores.open_on({"10.0.0.1": "127.0.0.1"}, config, ROUTERS, "token")
    assert stores.access is not None and stores.access.address == "127.0.0.1:7"


def test_one_folder_on_two_nodes_is_refused(ray: FakeRay) -> None:
    ray.folders = dict.fromkeys(NODES, "same")
    with pytest.raises(ValueError, match=r"^store_disk /d:1GiB is one folder on the nodes 10.0.0.1 and 10.0.0.2: "):
        opened(ray)


def test_a_node_s_refusal_names_it(ray: FakeRay) -> None:
    ray.refusal = RayError("store_memory is too much")
    with pytest.raises(ValueError, match=r"^node 10\.0\.0\.1: store_memory is too much$"):
        opened(ray)


def test_a_dead_keeper_is_replaced_before_its_store_starts(ray: FakeRay) -> None:
    stores = opened(ray)
    assert stores.prepare_start("store-1") == ()
    ray.actors["region-10.0.0.2.0"].is_dead = True
    (waited_for,) = stores.prepare_start("store-1")
    assert waited_for[0] == "10.1.0.2:7"
    order = ray.actors["region-10.0.0.2.1"].order
    assert (order.address, order.socket, order.namespace_secret) == ("10.1.0.2:7", "/socket of 10.0.0.2", "secret")
    assert stores.prepare_start("store-1") == () and stores.saved()["store-1"].life == 1
    assert stores.untouched_bytes == 200


def test_the_next_supervisor_takes_over(ray: FakeRay) -> None:
    saved = {name: decode(SavedStore, encode(store)) for name, store in opened(ray).saved().items()}
    # Replaced by a supervisor that died before it saved that.
    ray.actors["region-10.0.0.2.0"].is_dead = True
    lost = ray.create("region-10.0.0.2.1", ray.actors["region-10.0.0.2.0"].order)
    again: Any = NodeStores(ray)  # type: ignore[arg-type]
    again.restore(saved, CONFIG, ROUTERS, "token", "secret")
    assert again.configs["store-1"].port == 7 and again.access_by_node.keys() == NODES.keys()
    assert again.actors() == [ray.actors["region-10.0.0.1.0"]] and lost not in again.actors()
    assert again.prepare_start("store-0") == () and again.untouched_bytes == 100 + 2**20
    again.prepare_start("store-1")
    assert ray.actors["region-10.0.0.2.2"].order.namespace_secret == "secret"
