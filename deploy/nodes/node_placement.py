"""Places the processes of a cluster on several Ray nodes.

Each process has a placement group of one bundle, which keeps its CPUs and GPUs during a restart. The ranks of a worker
share a bundle, and so a node. When a node is lost, Ray moves its workers' groups, or queues them. The group of a router
waits for its node, whose address is known. So does the group of a page store; each node with workers has one.
"""

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem import hosts
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.config.node_choice import FreeNode, choose_nodes
from tandem.deploy.host.ports import ClientAddresses, ClusterPorts
from tandem.deploy.nodes.node_facts import SENT_MODULES, NodeFacts, node_facts
from tandem.deploy.nodes.port_holder import PortHolder, WantedPort
from tandem.deploy.on_ray.autoscaler import leaving_nodes
from tandem.deploy.on_ray.hosted_ray import HostedRay
from tandem.deploy.on_ray.own_node import own_address
from tandem.deploy.on_ray.ray_module import (
    NodeAffinitySchedulingStrategy,
    PlacementGroup,
    PlacementGroupID,
    PlacementGroupSchedulingStrategy,
    RayError,
    placement_group,
    placement_group_table,
    ray,
    remove_placement_group,
    state,
)
from tandem.deploy.plan import PoolsOfNode, check_num_threads, role_of
from tandem.router.config import RouterAddresses

logger = logging.getLogger(__name__)

CODE = "tandem"

# Covers a node's first process, and its code if Ray brings that.
ANSWER_TIMEOUT_S = 60.0
PLACED_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.05
# Ray's resource of each node, with capacity 1.
_OF_NODE = "node:{}"
_ON_NODE = 0.001
_HOLDER = "ports-{}"


@dataclass(slots=True)
class _Process:
    """Attributes: is_waiting: True once its wait was logged."""

    need: Mapping[str, float]
    group: PlacementGroup
    is_waiting: bool = False


@dataclass(slots=True)
class _Holder:
    """Attributes: life: number of earlier holders; alive: reference that ends with the actor."""

    life: int
    actor: Any
    alive: Any
    wanted: list[WantedPort]


@dataclass(frozen=True, slots=True)
class SavedPlacement:
    """A NodePlacement for the supervisor's next life. Attributes: processes: need and group id (hex)."""

    workers: tuple[str, ...]
    routers: tuple[str, ...]
    processes: dict[str, tuple[dict[str, float], str]]
    facts: dict[str, NodeFacts]
    router_nodes: dict[str, str]
    node_of_worker: dict[str, str]
    holders: dict[str, tuple[int, list[WantedPort]]]
    store_nodes: dict[str, str]


class NodePlacement:
    """The nodes of a cluster's processes. No call waits for a lost node."""

    def __init__(
        self, config: ClusterConfig, hosted: HostedRay, workers: Sequence[str], routers: Sequence[str]
    ) -> None:
        self._config = config
        self._hosted = hosted
        self._workers = workers
        self._routers = routers
        self._processes: dict[str, _Process] = {}
        # By Ray address.
        self._facts: dict[str, NodeFacts] = {}
        # As first chosen, by process name.
        self._router_nodes: dict[str, str] = {}
        self._node_of_worker: dict[str, str] = {}
        self._store_nodes: dict[str, str] = {}
        self._holders: dict[str, _Holder] = {}

    @staticmethod
    def restored(config: ClusterConfig, hosted: HostedRay, saved: SavedPlacement) -> "NodePlacement":
        """Replaces port holders that have died."""
        placement = NodePlacement(config, hosted, saved.workers, saved.routers)
        placement._processes = {
            name: _Process(need, PlacementGroup(PlacementGroupID.from_hex(group)))
            for name, (need, group) in saved.processes.items()
        }
        placement._facts = saved.facts
        placement._router_nodes, placement._node_of_worker = saved.router_nodes, saved.node_of_worker
        placement._store_nodes = saved.store_nodes
        running = hosted.find_actors()
        for node, (life, wanted) in saved.holders.items():
            if (actor := running.get(_HOLDER.format(node), {}).get(life)) is not None:
                placement._holders[node] = _Holder(life, actor, actor.wait_ended.remote(), wanted)
            else:
                again = placement._holders[node] = placement._start_holder(node, wanted, life + 1)
                again.actor.hold_again.remote(wanted)
        return placement

    def saved(self) -> SavedPlacement:
        return SavedPlacement(
            tuple(self._workers),
            tuple(self._routers),
            {name: (dict(process.need), process.group.id.hex()) for name, process in self._processes.items()},
            self._facts,
            self._router_nodes,
            self._node_of_worker,
            {node: (holder.life, holder.wanted) for node, holder in self._holders.items()},
            self._store_nodes,
        )

    def holders(self) -> list[Any]:
        return [holder.actor for holder in self._holders.values()]

    def place(self, model_dir: str) -> ClusterPorts:
        """Chooses and checks nodes, and reserves room and ports there. Args: model_dir: an absolute path.

        Raises:
            ValueError: there is no room, or a node lacks the code or the model.
        """
        nodes = _free_nodes()
        chosen = self._choose(nodes)
        ids = {node.address: node.node_id for node in nodes}
        self._check_nodes({address: ids[address] for address in dict.fromkeys(chosen.values())}, model_dir)
        for name, address in chosen.items():
            self._take_room(name, address, ids[address])
        deadline = time.monotonic() + PLACED_TIMEOUT_S
        for name in chosen:
            while not _node_of(self._processes[name].group):
                if time.monotonic() > deadline:
                    raise ValueError(f"the Ray has no room for {name} any more: others may have taken it")
                time.sleep(POLL_INTERVAL_S)
        for name, address in chosen.items():
            logger.info("%s is placed on %s", name, address)
        return self._hold_ports()

    def actor_options(self, name: str) -> dict[str, Any]:
        return {"num_cpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(self._processes[name].group, 0)}

    def is_here(self, name: str) -> bool:
        """Args: name: of a router or page store."""
        return self._fixed_nodes[name] == own_address()

    def store_hosts(self) -> dict[str, str]:
        """Returns the address at which other nodes reach each node with a page store, by Ray address."""
        interface = self._config.interface
        return {
            node: hosts.choose_address(self._facts[node].addresses, interface, node)
            for node in self._store_nodes.values()
        }

    def is_placed(self, name: str) -> bool:
        return bool(self.node_of(name))

    def node_of(self, name: str) -> str:
        """Returns the id of the process's node; "" while Ray has no room for it."""
        return _node_of(self._processes[name].group)

    def has_room(self, name: str) -> bool:
        """Returns whether a process to restart has a node; logs each change once."""
        process = self._processes[name]
        node_id = _node_of(process.group)
        if node_id in leaving_nodes():
            # Ray moves its room when the node has gone.
            return False
        if not node_id:
            if not process.is_waiting:
                if (node := self._fixed_nodes.get(name)) is not None:
                    logger.warning("%s waits for the node %s to be in the Ray", name, node)
                else:
                    amounts = ", ".join(f"{amount:g} {resource}" for resource, amount in process.need.items())
                    logger.warning("%s waits: no node of the Ray has room for it (%s)", name, amounts)
            process.is_waiting = True
            return False
        if process.is_waiting:
            process.is_waiting = False
            logger.warning("%s has room on %s", name, _address_of(node_id))
        return True

    def ports_of(self, router: str) -> tuple[Any, ...]:
        """Replaces the node's dead port holder; returns references for the router's start to await."""
        node = self._router_nodes[router]
        holder = self._holders[node]
        dead, _ = ray.wait([holder.alive], timeout=0)
        if not dead:
            return ()
        again = self._holders[node] = self._start_holder(node, holder.wanted, holder.life + 1)
        return (again.actor.hold_again.remote(again.wanted),)

    def close(self) -> None:
        for holder in self._holders.values():
            ray.kill(holder.actor)
        for process in self._processes.values():
            remove_placement_group(process.group)
        self._holders, self._processes = {}, {}

    def num_threads(self, worker: str) -> int:
        """Returns a worker's share of its node's CPUs; for added workers the smallest share."""
        node = self._node_of_worker.get(worker)
        if node is None:
            # A cluster of no worker at the start shares the smallest known node.
            alone = min(facts.num_cpus for facts in self._facts.values()) // self._config.largest.num_ranks
            return min(map(self.num_threads, self._workers), default=max(1, alone))
        together = sum(
            self._config.degree_of(role_of(other)) for other in self._workers if self._node_of_worker.get(other) == node
        )
        return max(1, self._facts[node].num_cpus // together)

    def pools(self) -> list[PoolsOfNode]:
        counts = Counter(self._node_of_worker.values())
        return [PoolsOfNode(node, num, self._facts[node].available_bytes) for node, num in counts.items()]

    def reserve(self, names: Sequence[str]) -> None:
        """Asks Ray for the room of workers to come. Without room the request stands, and Ray may add a node for it."""
        nodes = _free_nodes()
        ids = {node.address: node.node_id for node in nodes}
        try:
            places = choose_nodes(nodes, [self._worker_need(name) for name in names], self._config.placement_strategy)
        except ValueError:
            # There is no node if all are announced to go.
            places = [nodes[0].address if nodes else ""] * len(names)
        for name, address in zip(names, places, strict=True):
            self._take_room(name, address, ids.get(address))

    def release(self, names: Sequence[str]) -> None:
        """Takes back the requests of processes; those that were never reserved have none."""
        for name in names:
            if (process := self._processes.pop(name, None)) is not None:
                remove_placement_group(process.group)

    def release_others(self, names: Collection[str]) -> None:
        """Takes back the requests of workers that an earlier supervisor had only reserved."""
        self.release([name for name in self._processes if name not in names and name not in self._fixed_nodes])

    def need_of(self, name: str) -> str:
        """Returns a worker's resources as text."""
        return "{" + ", ".join(f"{key}: {amount:g}" for key, amount in self._worker_need(name).items()) + "}"

    def processes_on(self, node_id: str) -> list[str]:
        return [name for name, process in self._processes.items() if _node_of(process.group) == node_id]

    @property
    def names(self) -> list[str]:
        """All processes that have room or wait for it."""
        return list(self._processes)

    @property
    def _fixed_nodes(self) -> dict[str, str]:
        """Nodes of the processes that Ray does not move."""
        return self._router_nodes | self._store_nodes

    def _worker_need(self, name: str) -> dict[str, float]:
        role = role_of(name)
        return _need(self._config.gpus_of(role), self._config.degree_of(role))

    def _choose(self, nodes: Sequence[FreeNode]) -> dict[str, str]:
        config = self._config
        # A specific address is this host's.
        for_routers = nodes if hosts.is_any(config.host) else nodes[:1]
        places = choose_nodes(for_routers, [_need(0)] * len(self._routers), config.placement_strategy)
        self._router_nodes = dict(zip(self._routers, places, strict=True))
        # Of a node that may get workers, and a page store with them.
        num_stores = 1 if config.store_memory else 0
        left = [
            node._replace(
                free={**node.free, "CPU": node.free.get("CPU", 0.0) - places.count(node.address) - num_stores}
            )
            for node in nodes
        ]
        places = choose_nodes(left, [self._worker_need(name) for name in self._workers], config.placement_strategy)
        self._node_of_worker = dict(zip(self._workers, places, strict=True))
        if config.store_memory:
            self._store_nodes = {f"store-{i}": node for i, node in enumerate(dict.fromkeys(places))}
        return self._node_of_worker | self._fixed_nodes

    def _check_nodes(self, nodes: Mapping[str, str], model_dir: str) -> None:
        own = NodeFacts(**node_facts(CODE, model_dir))
        for module in SENT_MODULES:
            ray.cloudpickle.register_pickle_by_value(module)
        try:
            ask = ray.remote(node_facts)
            asked = {
                ask.options(
                    num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
                ).remote(CODE, model_dir): address
                for address, node_id in nodes.items()
            }
        finally:
            for module in SENT_MODULES:
                ray.cloudpickle.unregister_pickle_by_value(module)
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_TIMEOUT_S)
        if silent:
            raise ValueError(
                f"node {', '.join(asked[ref] for ref in silent)} of the Ray runs nothing within {ANSWER_TIMEOUT_S:g} s"
            )
        for ref in answered:
            address = asked[ref]
            try:
                facts = NodeFacts(**ray.get(ref))
            except RayError as error:
                raise ValueError(
                    f"node {address} of the Ray cannot be asked: {' '.join(str(error).split())}"
                ) from error
            _check_facts(address, facts, own, model_dir)
            check_num_threads(self._config, facts.num_cpus, f"node {address}")
            try:
                hosts.choose_address(facts.addresses, self._config.interface, address)
            except ValueError as error:
                raise ValueError(f"node {address}: {error}; choose another `interface`") from error
            self._facts[address] = facts

    def _take_room(self, name: str, address: str, node_id: str | None) -> None:
        options: dict[str, Any] = {
            "strategy": "STRICT_PACK",
            "name": self._hosted.group_name(name),
            "lifetime": "detached",
        }
        if name in self._fixed_nodes:
            need = {**_need(0), _OF_NODE.format(address): _ON_NODE}
            group = placement_group([need], **options)
        else:
            need = self._worker_need(name)
            # Only a hint: if this node is lost, any other fits.
            group = placement_group([need], **options, _soft_target_node_id=node_id)
        self._processes[name] = _Process(need, group)

    def _hold_ports(self) -> ClusterPorts:
        config = self._config
        shared = [
            WantedPort(config.host, config.grpc_port, "grpc_port"),
            WantedPort(config.host, config.http_port, "http_port"),
        ]
        is_alone = len(self._routers) == 1
        routers: dict[str, RouterAddresses] = {}
        for node in dict.fromkeys(self._router_nodes.values()):
            here = [name for name, at in self._router_nodes.items() if at == node]
            own_host = hosts.choose_address(self._facts[node].addresses, config.interface, node)
            own = [WantedPort(config.host, 0, "grpc_port"), WantedPort(config.host, 0, "http_port")]
            each = [*([] if is_alone else own), WantedPort(own_host, 0, "interface")]
            wanted = [*shared, *(one for _ in here for one in each)]
            holder = self._holders[node] = self._start_holder(node, wanted, 0)
            numbers = _answer(holder.actor.hold.remote(wanted), node)
            holder.wanted = [one._replace(port=number) for one, number in zip(wanted, numbers, strict=True)]
            # The first node's shared ports apply to all nodes.
            shared = holder.wanted[: len(shared)]
            client_host = own_host if hosts.is_any(config.host) else config.host
            rest = iter(numbers[len(shared) :])
            for name in here:
                grpc, http = numbers[: len(shared)] if is_alone else (next(rest), next(rest))
                routers[name] = RouterAddresses(
                    f"{client_host}:{grpc}", f"{client_host}:{http}", f"{own_host}:{next(rest)}"
                )
        first = routers[self._routers[0]]
        host = first.grpc.rpartition(":")[0]
        addresses = ClientAddresses(*(f"{host}:{one.port}" for one in shared))
        return ClusterPorts(addresses, {name: routers[name] for name in self._routers})

    def _start_holder(self, node: str, wanted: list[WantedPort], life: int) -> _Holder:
        # A node that comes back has a new id but the same address.
        options: dict[str, Any] = {"num_cpus": 0, "resources": {_OF_NODE.format(node): _ON_NODE}, "max_concurrency": 2}
        options |= self._hosted.naming(f"{_HOLDER.format(node)}.{life}")
        actor: Any = ray.remote(PortHolder).options(**options, max_restarts=0).remote()
        return _Holder(life, actor, actor.wait_ended.remote(), wanted)


def _check_facts(address: str, facts: NodeFacts, own: NodeFacts, model_dir: str) -> None:
    advice = "install the same there, or have Ray bring it (ship_code)"
    if not facts.sources:
        raise ValueError(f"node {address} of the Ray has no tandem-llm, which is {own.version} here; {advice}")
    if facts.sources != own.sources:
        raise ValueError(
            f"node {address} of the Ray has tandem-llm {facts.version or '?'}, and here is {own.version}"
            + ("" if facts.version != own.version else " with other files")
            + f"; {advice}"
        )
    if facts.model_error:
        raise ValueError(
            f"node {address} of the Ray cannot read the model: {facts.model_error}; it must be at {model_dir} on every "
            "node"
        )
    if facts.model != own.model:
        raise ValueError(
            f"node {address} of the Ray has another model at {model_dir}: its config.json or its weights' files differ"
        )


def _need(num_gpus: float, num_cpus: float = 1.0) -> dict[str, float]:
    return {"CPU": num_cpus, "GPU": num_gpus} if num_gpus else {"CPU": num_cpus}


def _answer(ref: Any, node: str) -> Any:
    try:
        return ray.get(ref, timeout=ANSWER_TIMEOUT_S)
    except RayError as error:
        raise ValueError(f"node {node}: {getattr(error, 'cause', None) or error}") from error


def _free_nodes() -> list[FreeNode]:
    leaving = leaving_nodes()
    here = ray.get_runtime_context().get_node_id()
    free = state.available_resources_per_node()
    nodes = [
        FreeNode(node["NodeID"], node["NodeManagerAddress"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    ]
    return sorted(nodes, key=lambda node: (node.node_id != here, node.address))


def _node_of(group: PlacementGroup) -> str:
    """Returns "" while Ray has no room for the group."""
    found = placement_group_table(group)
    return next(iter(found["bundles_to_node_id"].values())) if found.get("state") == "CREATED" else ""


def _address_of(node_id: str) -> str:
    return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id), node_id)
