"""The page stores of a cluster on an existing Ray: one per node, whose region a detached actor there owns."""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.nodes.region_keeper import KeptRegion, RegionKeeper, RegionOrder
from tandem.deploy.on_ray.hosted_ray import HostedRay
from tandem.deploy.on_ray.ray_module import RayError, ray
from tandem.deploy.on_ray.sealed import KeyPair
from tandem.deploy.supervise.stores import Stores
from tandem.worker.config import StoreAccess

logger = logging.getLogger(__name__)

# Covers a node's first process, and its code if Ray brings that.
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 5.0
# Ray's resource of each node, with capacity 1.
_OF_NODE = "node:{}"
_ON_NODE = 0.001
_KEEPER = "region-{}"


@dataclass(slots=True)
class _Keeper:
    """Attributes: life: number of earlier keepers of the node; ended: reference that ends with the actor."""

    node: str
    kept: KeptRegion
    life: int
    actor: Any
    ended: Any

    @property
    def is_dead(self) -> bool:
        return self.actor is None or bool(ray.wait([self.ended], timeout=0)[0])


@dataclass(frozen=True, slots=True)
class SavedStore:
    """A node's store for the supervisor's next life. Attributes: life: of the region's keeper."""

    node: str
    kept: KeptRegion
    life: int


class NodeStores(Stores):
    def __init__(self, hosted: HostedRay) -> None:
        super().__init__()
        self._hosted = hosted
        self._config: ClusterConfig | None = None
        self._cluster_token = ""
        self._namespace_secret = ""
        # By name of the store.
        self._keepers: dict[str, _Keeper] = {}

    @property
    def untouched_bytes(self) -> int:
        """As Stores. A region whose keeper does not answer counts as untouched."""
        return sum(map(self._num_untouched_bytes, self._keepers.values()))

    def open_on(
        self, nodes: Mapping[str, str], config: ClusterConfig, routers: Sequence[str], cluster_token: str
    ) -> str:
        """Creates a region on each node. Returns the secret of cache namespaces; "" without a disk.

        Args:
            nodes: the address at which other nodes reach each node, by Ray address. The first with a folder decides
                about the secret.
            routers: addresses of their ports for workers and stores.

        Raises:
            ValueError: a node has too little memory, or its folder of pages cannot be used.
        """
        self._config, self._cluster_token = config, cluster_token
        first, *others = enumerate(nodes.items())
        self._open([first])
        if config.disk is not None:
            self._namespace_secret = self._read_secret(self._keepers[_name(0)])
        self._open(others)
        self._check_folders()
        self._configure(routers)
        return self._namespace_secret

    def restore(
        self,
        saved: Mapping[str, SavedStore],
        config: ClusterConfig,
        routers: Sequence[str],
        cluster_token: str,
        namespace_secret: str,
    ) -> None:
        """Takes over the stores of an earlier supervisor."""
        self._config, self._cluster_token, self._namespace_secret = config, cluster_token, namespace_secret
        running = self._hosted.find_actors()
        for name, store in saved.items():
            lives = running.get(_KEEPER.format(store.node), {})
            actor = lives.get(store.life)
            self._keepers[name] = _Keeper(
                store.node,
                KeptRegion(*store.kept),
                # The earlier supervisor may have died before it saved a keeper's replacement.
                max(lives, default=store.life),
                actor,
                actor.wait_ended.remote() if actor is not None else None,
            )
        self._configure(routers)

    def saved(self) -> dict[str, SavedStore]:
        return {name: SavedStore(keeper.node, keeper.kept, keeper.life) for name, keeper in self._keepers.items()}

    def actors(self) -> list[Any]:
        """Returns the regions' keepers."""
        return [keeper.actor for keeper in self._keepers.values() if keeper.actor is not None]

    def prepare_start(self, name: str) -> tuple[Any, ...]:
        """Replaces a dead keeper: the new one has a new region at the same address."""
        keeper = self._keepers[name]
        if not keeper.is_dead:
            return ()
        order = self._order(keeper.kept.address, keeper.kept.socket)
        keeper.life += 1
        keeper.actor = self._create(keeper.node, keeper.life, order)
        keeper.ended = keeper.actor.wait_ended.remote()
        logger.warning("the memory of %s is lost: workers of its node that map it serve without a page store", name)
        return (keeper.actor.start.remote(),)

    def close(self) -> None:
        keepers, self._keepers = self._keepers, {}
        actors = [keeper.actor for keeper in keepers.values() if keeper.actor is not None]
        refs = [actor.stop.remote() for actor in actors]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=STOP_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)

    def _open(self, nodes: Iterable[tuple[int, tuple[str, str]]]) -> None:
        started = {}
        for number, (node, host) in nodes:
            actor = self._create(node, 0, self._order(f"{host}:0", ""))
            keeper = _Keeper(node, KeptRegion(f"{host}:0", "", "", ""), 0, actor, actor.wait_ended.remote())
            self._keepers[_name(number)] = keeper
            started[number] = (keeper, actor.start.remote())
        for keeper, ref in started.values():
            keeper.kept = KeptRegion(*_answer(ref, keeper.node))

    def _order(self, address: str, socket: str) -> RegionOrder:
        assert self._config is not None
        return RegionOrder(
            self._config.store_memory_bytes,
            address,
            socket,
            self._cluster_token,
            self._config.disk,
            self._namespace_secret,
        )

    def _create(self, node: str, life: int, order: RegionOrder) -> Any:
        # A node that comes back has a new id but the same address.
        options: dict[str, Any] = {"num_cpus": 0, "resources": {_OF_NODE.format(node): _ON_NODE}, "max_concurrency": 4}
        options |= self._hosted.naming(f"{_KEEPER.format(node)}.{life}")
        return self._hosted.create(ray.remote(RegionKeeper).options(**options, max_restarts=0), order)

    def _read_secret(self, keeper: _Keeper) -> str:
        keys = KeyPair()
        return keys.open(_answer(keeper.actor.namespace_secret.remote(keys.public_key), keeper.node)).decode()

    def _check_folders(self) -> None:
        found: dict[str, str] = {}
        for keeper in self._keepers.values():
            other = found.setdefault(keeper.kept.folder or keeper.node, keeper.node)
            if other != keeper.node:
                assert self._config is not None
                raise ValueError(
                    f"store_disk {self._config.store_disk} is one folder on the nodes {other} and {keeper.node}: it "
                    "must be on a disk of each node"
                )

    def _configure(self, routers: Sequence[str]) -> None:
        assert self._config is not None
        for name, keeper in self._keepers.items():
            kept = keeper.kept
            self.configs[name] = self._config.store(
                name,
                kept.address,
                tuple(routers),
                kept.socket,
                self._cluster_token,
                kept.rack,
                self._namespace_secret,
            )
            access = StoreAccess(kept.address, kept.socket, self._config.store_write_after)
            self.access_by_node[keeper.node] = access
        if not self._config.spans_nodes:
            (self.access,) = self.access_by_node.values()

    def _num_untouched_bytes(self, keeper: _Keeper) -> int:
        assert self._config is not None
        if keeper.actor is not None:
            with contextlib.suppress(RayError, TimeoutError):
                num_bytes: int = ray.get(keeper.actor.num_untouched_bytes.remote(), timeout=ANSWER_TIMEOUT_S)
                return num_bytes
        return self._config.store_memory_bytes


def _name(number: int) -> str:
    return f"store-{number}"


def _answer(ref: Any, node: str) -> Any:
    try:
        return ray.get(ref, timeout=START_TIMEOUT_S)
    except (RayError, TimeoutError) as error:
        reason = " ".join(str(getattr(error, "cause", None) or error).split())
        raise ValueError(f"node {node}: {reason or 'the owner of the page store does not answer'}") from error
