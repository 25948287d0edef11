"""Starts, supervises and stops a cluster: routers and workers, on a Ray of its own or an existing one."""

import contextlib
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.config import ClusterTls, ClusterTlsFiles
from tandem.deploy.adapters import read_adapters
from tandem.deploy.config.bounds import Bounds, SizedKind
from tandem.deploy.config.cluster_config import ClusterConfig, WorkerPlan
from tandem.deploy.config.cluster_options import AUTO, OFF
from tandem.deploy.drafter import check_drafter_name, with_drafter
from tandem.deploy.errors import ClusterError, refusals
from tandem.deploy.host.certificates import given_certificates, make_certificates
from tandem.deploy.host.ports import ClientAddresses, ClusterPorts, ReservedPorts
from tandem.deploy.host.request_lines import RequestLineServer
from tandem.deploy.host.run_record import default_directory
from tandem.deploy.host.store_folder import open_disk
from tandem.deploy.nodes.node_placement import NodePlacement, SavedPlacement
from tandem.deploy.on_ray.autoscaler import leaving_nodes
from tandem.deploy.on_ray.hosted_ray import STATE, HostedRay
from tandem.deploy.on_ray.local_ray import LocalRay
from tandem.deploy.on_ray.own_node import own_address
from tandem.deploy.on_ray.ray_base import RayBase, StartError
from tandem.deploy.on_ray.ray_module import ray
from tandem.deploy.plan import (
    check_before_fetching,
    check_num_threads,
    check_own_classes,
    plan,
    router_names,
    worker_names,
)
from tandem.deploy.supervise.change import Change, ChangeJob, ChangeQueue
from tandem.deploy.supervise.evacuating import LeavingNodes
from tandem.deploy.supervise.installed import CheckInstalled
from tandem.deploy.supervise.members import Basis, Members
from tandem.deploy.supervise.newest_keys import NewestKeys
from tandem.deploy.supervise.node_stores import NodeStores, SavedStore
from tandem.deploy.supervise.processes import OnProgress, Processes
from tandem.deploy.supervise.restarting import RestartedKind, Restarting, RestartJob
from tandem.deploy.supervise.role_planner import RolePlanner
from tandem.deploy.supervise.role_plans import RolePlans
from tandem.deploy.supervise.room import check_num_gpus
from tandem.deploy.supervise.scaling import ScaleJob
from tandem.deploy.supervise.size_planner import SizePlanner
from tandem.deploy.supervise.sizing import Sizing
from tandem.deploy.supervise.supervisor import Supervisor
from tandem.engine.weights.resolve import resolve_model
from tandem.forward_times import start_times
from tandem.router.config import RouterAddresses, RouterConfig
from tandem.router.workers.objectives import Objectives
from tandem.rpc.tls import check_tls_files, check_validity

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterState:
    """The state from which another process takes over a running cluster.

    Attributes:
        drains_until: end of the drain, as of time.time; None: no stop was requested.
        routers: names of the routers that are to run.
        bounds: bounds of the kinds whose number follows the load; the numbers wanted last are those of worker_plans and
            routers.
        start_s: as in Processes.
    """

    cluster_token: str = field(repr=False)
    cluster_tls: ClusterTls | ClusterTlsFiles | None
    model_dir: Path
    ports: ClusterPorts
    router_configs: dict[str, RouterConfig]
    worker_plans: dict[str, WorkerPlan]
    num_starts: dict[str, int]
    nodes: SavedPlacement | None
    stores: dict[str, SavedStore]
    has_started: bool
    drains_until: float | None = None
    routers: list[str] = field(default_factory=list)
    bounds: dict[SizedKind, Bounds] = field(default_factory=dict)
    start_s: dict[SizedKind, float] = field(default_factory=dict)


class Cluster:
    """A cluster, from start to stop. A context manager; all methods but `scale` are called from one thread.

    Attributes:
        cluster_token: lets a process take part; new for each cluster.
        cluster_tls: None: no TLS.
        addresses: the clients' ports.
        routers: each router's own addresses, by name.
    """

    def __init__(
        self,
        config: ClusterConfig,
        on_progress: OnProgress,
        on_request_line: Callable[[str], None] = print,
        hosted: HostedRay | None = None,
    ) -> None:
        """
        Args:
            on_request_line: called with each line of log_requests, on any thread.
            hosted: the Ray that this process is an actor of; the cluster then outlives this process.
        """
        self._config = config
        self._on_progress = on_progress
        self._on_request_line = on_request_line
        self._request_lines: RequestLineServer | None = None
        self._hosted = hosted
        self._nodes: NodePlacement | None = None
        self._ray: RayBase = hosted or LocalRay(default_directory())
        # On an existing Ray, the regions outlive this process.
        self._node_stores = NodeStores(hosted) if hosted is not None else None
        self._processes = Processes(config, self._ray, on_progress, on_request_line, self._save, self._node_stores)
        self._has_started = False
        # Wall-clock time: the process that takes over may run on another host.
        self._drains_until: float | None = None
        self._must_look_at_files = False
        self._ports = ReservedPorts()
        self._cluster_ports = ClusterPorts(ClientAddresses("", ""), {})
        self._model_dir = Path()
        self._changes = ChangeQueue()
        self._bounds = dict(config.bounds)
        # Locks on converted models: restarted workers read the files again.
        self._held = contextlib.ExitStack()
        self.cluster_token = secrets.token_hex(16)
        self.cluster_tls: ClusterTls | ClusterTlsFiles | None = None
        self.addresses = ClientAddresses("", "")
        self.routers: dict[str, RouterAddresses] = {}
        self.model_name = ""

    @property
    def store_address(self) -> str:
        """The first page store's address; empty without one."""
        first = next(iter(self._processes.stores.configs.values()), None)
        return f"{first.host}:{first.port}" if first is not None else ""

    @property
    def router_ready_s(self) -> float:
        return self._processes.router_ready_s

    def __enter__(self) -> "Cluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the cluster can serve a request.

        Raises:
            ConfigurationError: the cluster cannot start as configured.
            ClusterError: another failure.
        """
        config = self._config
        with refusals():
            check_own_classes(config)
            if not config.spans_nodes:
                check_num_threads(config, len(os.sched_getaffinity(0)), "this host")
            ports = ClusterPorts(self.addresses, {}) if config.spans_nodes else self._ports.reserve_all(config)
            check_tls_files(config.tls_cert, config.tls_key, config.tls_client_ca)
            if config.tls_cert:
                check_validity(config.tls_cert)
            # Without a disk, pages and the names of their namespaces end with the cluster.
            own_disk = config.disk if self._hosted is None else None
            namespace_secret = open_disk(own_disk) if own_disk is not None else ""
            if config.internal_tls_cert:
                self.cluster_tls = given_certificates(
                    config.internal_tls_ca, config.internal_tls_cert, config.internal_tls_key
                )
            check_drafter_name(config)
        needs_ray_first = config.device == "cuda" or config.spans_nodes
        if needs_ray_first:
            # Before a model is fetched for minutes.
            self._init_ray()
        if config.device == "cuda":
            check_num_gpus(config, self._ray)
        with refusals():
            self._on_progress("model", "looking at it")
            config = self._config = with_drafter(config, config.load_format, self._on_model_progress, self._held)
            model_dir = resolve_model(
                config.model,
                config.load_format,
                on_progress=self._on_model_progress,
                held=self._held,
                check=functools.partial(check_before_fetching, config),
            )
            if config.spans_nodes:
                ports = self._place(model_dir)
            router_configs, worker_plans = plan(config, model_dir, self.cluster_token, ports, nodes=self._nodes)
        self._model_dir, self._cluster_ports = model_dir, ports
        self.model_name = router_configs[0].model_name
        self.addresses, self.routers = ports.shared, ports.routers
        self._on_progress("model", "ready")
        if config.store_memory:
            with refusals():
                if self._node_stores is None:
                    self._processes.stores.open(
                        config, default_directory(), ports, self.cluster_token, namespace_secret
                    )
                else:
                    namespace_secret = self._open_node_stores(self._node_stores)
        with refusals():
            # Once: routers that start later must name the same content.
            adapters = read_adapters(config, config.engine(str(model_dir)), router_configs[0].model_names)
        router_configs = [replace(c, namespace_secret=namespace_secret, adapters=adapters) for c in router_configs]
        router_configs = self._with_request_lines(router_configs)
        if not needs_ray_first:
            self._init_ray()
        if self.cluster_tls is None and self._is_tls_wanted():
            self.cluster_tls = make_certificates()
        if self.cluster_tls is not None:
            self._check_ray_is_private()
        self._processes.configure(
            {c.router_id: c for c in router_configs},
            {p.worker.worker_id: p for p in worker_plans},
            self._nodes,
            self.cluster_tls,
            routers=router_names(config),
        )
        self._save()
        self._start_all()

    def _place(self, model_dir: Path) -> ClusterPorts:
        assert self._hosted is not None
        self._on_progress("model", "looking at it on each node")
        workers = [name for name, _ in worker_names(self._config)]
        self._nodes = NodePlacement(self._config, self._hosted, workers, router_names(self._config))
        return self._nodes.place(str(model_dir.absolute()))

    def _open_node_stores(self, stores: NodeStores) -> str:
        self._on_progress("page store", "taking memory on each node")
        nodes = self._nodes.store_hosts() if self._nodes is not None else {own_address(): "127.0.0.1"}
        routers = [addresses.cluster for addresses in self.routers.values()]
        namespace_secret = stores.open_on(nodes, self._config, routers, self.cluster_token)
        self._on_progress("page store", "ready")
        return namespace_secret

    def _with_request_lines(self, routers: list[RouterConfig]) -> list[RouterConfig]:
        if not self._config.log_requests:
            return routers
        if self._config.spans_nodes:
            # A socket does not reach routers on other hosts.
            return [replace(c, keeps_request_lines=True) for c in routers]
        self._request_lines = RequestLineServer(self._on_request_line)
        return [replace(c, request_lines_socket=self._request_lines.name) for c in routers]

    def _start_all(self) -> None:
        self._processes.start_all()
        self._has_started = True
        self._save()

    def recover(self, saved: ClusterState) -> None:
        """Takes over the cluster of a dead process, and repeats a start that was cut short.

        Ends processes that do not take part; `supervise` starts them again.

        Raises:
            ClusterError: as for `start`.
        """
        assert self._hosted is not None
        self.cluster_token, self.cluster_tls = saved.cluster_token, saved.cluster_tls
        self._model_dir = saved.model_dir
        self._cluster_ports = saved.ports
        self.addresses, self.routers = saved.ports.shared, saved.ports.routers
        if saved.nodes is not None:
            self._nodes = NodePlacement.restored(self._config, self._hosted, saved.nodes)
            self._nodes.release_others(saved.worker_plans)
        else:
            self._ports.reserve_again(saved.ports)
        # An unfinished scaling is dropped: workers that were to leave stay.
        planned = {name: plan.worker.role for name, plan in saved.worker_plans.items()}
        router_configs = {name: replace(c, workers=planned) for name, c in saved.router_configs.items()}
        first = next(iter(router_configs.values()))
        self.model_name = first.model_name
        if saved.stores and self._node_stores is not None:
            routers = [addresses.cluster for addresses in self.routers.values()]
            self._node_stores.restore(saved.stores, self._config, routers, self.cluster_token, first.namespace_secret)
        self._processes.configure(
            router_configs,
            saved.worker_plans,
            self._nodes,
            self.cluster_tls,
            num_starts=saved.num_starts,
            routers=saved.routers,
        )
        self._processes.start_s |= saved.start_s
        self._bounds.clear()
        self._bounds.update(saved.bounds)
        if first.request_lines_socket:
            self._request_lines = RequestLineServer(self._on_request_line, first.request_lines_socket)
        with contextlib.suppress(ValueError, OSError):
            resolve_model(self._config.model, self._config.load_format, held=self._held)
            self._config = with_drafter(self._config, self._config.load_format, held=self._held)
        self._has_started = saved.has_started
        self._drains_until = saved.drains_until
        self._processes.take_over(self._hosted.find_actors() if saved.has_started else {})
        holders = self._nodes.holders() if self._nodes is not None else []
        holders += self._node_stores.actors() if self._node_stores is not None else []
        self._hosted.end_all(besides=[*self._processes.actors.values(), *holders])
        if not saved.has_started:
            self._start_all()

    def supervise(self, stop: threading.Event) -> None:
        """Restarts dead processes and carries out `scale` requests until `stop` is set.

        Raises:
            ClusterError: Ray has ended, and all processes with it.
        """
        kinds, _ = self._processes.kinds()
        running = {name: kind for name, kind in kinds.items() if name in self._processes.actors}
        supervisor = Supervisor(self._processes.actors, running, self._may_start)
        for name in kinds.keys() - running.keys():
            supervisor.add(name, kinds[name])
        members = Members(
            Basis(self._config, self._model_dir, self.cluster_token, self._cluster_ports, self._nodes),
            self._bounds,
            self._ray,
            self._processes,
            supervisor,
            self._save,
        )
        objectives = Objectives.of_ms(self._config.ttft_objective_ms, self._config.itl_objective_ms)
        sizing = Sizing(
            members, SizePlanner({}, objectives, time.monotonic, start_times(self._config.device)), time.monotonic
        )
        role_planner = RolePlanner(objectives, time.monotonic) if self._config.plans_roles else None
        role_plans = RolePlans(role_planner, self._processes.running_routers, sizing.size, time.monotonic)
        nodes = self._nodes
        leaving = LeavingNodes(leaving_nodes, nodes.processes_on, self._config.node_timeout_s) if nodes else None
        newest_keys = NewestKeys(self._config.key_file) if self._config.key_file is not None else None

        def take_turn() -> None:
            if newest_keys is not None and (keys := newest_keys.take()) is not None:
                self._processes.use_keys(keys)
                self._save()
            if leaving is not None and (ends := leaving.take()) is not None:
                for change in members.evacuate(ends):
                    self._changes.begin(change)
            self._changes.take_turn(
                lambda job: self._plan_change(job, supervisor, members, sizing),
                # Both choose workers.
                lambda job: not (isinstance(job, ScaleJob) and sizing.is_changing),
            )
            if self._must_look_at_files:
                self._must_look_at_files = False
                self._processes.look_at_files()
            role_plans.take_turn()
            sizing.take_turn(role_plans.demands, _held(self._changes.job))

        if newest_keys is not None:
            newest_keys.start()
        try:
            supervisor.run(stop, take_turn)
        finally:
            if newest_keys is not None:
                newest_keys.end()
            self._changes.give_up()
            sizing.give_up()

    def scale(self, counts: Mapping[SizedKind, int | Bounds]) -> ScaleJob:
        """Requests new numbers of processes for the named kinds, or bounds for them. May be called from any thread.

        New workers start first if there is room. Workers with the highest numbers leave: they end when idle, or after
        drain_timeout_s, when their requests restart elsewhere.
        """
        job = ScaleJob(counts)
        self._changes.ask(job)
        return job

    def restart(self, process: str) -> RestartJob:
        """Requests the restart of a router, worker or page store. May be called from any thread."""
        job = RestartJob(process)
        self._changes.ask(job)
        return job

    def look_at_files(self) -> None:
        """Makes the routers look at their certificates' and keys' files now instead of within WATCH_INTERVAL_S. For
        handlers of signals: takes no lock."""
        self._must_look_at_files = True

    @property
    def is_draining(self) -> bool:
        """True if a stop was requested, from this process or an earlier one."""
        return self._drains_until is not None

    def begin_drain(self) -> float:
        """Returns the seconds left of drain_timeout_s, counted from the first call in this or an earlier process."""
        now = time.time()
        if self._drains_until is None:
            self._drains_until = now + self.drain_timeout_s
            self._save()
        return min(self._drains_until - now, self.drain_timeout_s)

    def drain(self, timeout_s: float) -> int:
        """Refuses new requests; returns the number still running after timeout_s."""
        return self._processes.drain(timeout_s)

    def stop(self) -> None:
        self._ports.close()
        if ray.is_initialized() and self._ray.is_up():
            self._processes.stop()
        if self._node_stores is None:
            self._processes.stores.close()
        if ray.is_initialized() and self._ray.is_up():
            # The owners of regions end last.
            if self._node_stores is not None:
                self._node_stores.close()
            if self._nodes is not None:
                self._nodes.close()
            if self._hosted is not None:
                self._hosted.end_all()
                self._hosted.forget()
        if self._request_lines is not None:
            self._request_lines.close()
            self._request_lines = None
        self._ray.stop()
        self._held.close()

    def _plan_change(self, job: ChangeJob, supervisor: Supervisor, members: Members, sizing: Sizing) -> Change:
        if isinstance(job, ScaleJob):
            change = members.plan_scaling(job)
            sizing.withdraw()
            return change
        assert isinstance(job, RestartJob)
        if sizing.changes(job.process):
            raise ValueError(f"{job.process} is starting or leaving")
        names: dict[RestartedKind, Iterable[str]] = {
            "router": self._processes.routers,
            "worker": self._processes.worker_plans,
            "store": self._processes.stores.configs,
        }
        for restarted, own in names.items():
            if job.process in own:
                return Restarting(job, members, supervisor, CheckInstalled(), restarted)
        known = ", ".join(name for own in names.values() for name in own)
        raise ValueError(f"the cluster has no process {job.process}; there are: {known}")

    @property
    def drain_timeout_s(self) -> float:
        return self._config.drain_timeout_s

    def actor(self, name: str) -> Any:
        """Returns the actor of a running process, or None."""
        return self._processes.actors.get(name)

    def _save(self) -> None:
        if self._hosted is not None:
            self._hosted.save(
                STATE,
                ClusterState(
                    self.cluster_token,
                    self.cluster_tls,
                    self._model_dir,
                    self._cluster_ports,
                    self._processes.router_configs,
                    self._processes.worker_plans,
                    dict(self._processes.num_starts),
                    self._nodes.saved() if self._nodes is not None else None,
                    self._node_stores.saved() if self._node_stores is not None else {},
                    self._has_started,
                    self._drains_until,
                    list(self._processes.routers),
                    dict(self._bounds),
                    dict(self._processes.start_s),
                ),
            )

    def _init_ray(self) -> None:
        self._on_progress("ray", "starting")
        try:
            with refusals():
                num_stores = 1 if self._config.store_memory else 0
                self._ray.start(self._config.num_ranks + self._config.num_routers_started + num_stores)
        except StartError as error:
            raise ClusterError(str(error)) from error
        self._on_progress("ray", "ready")

    def _is_tls_wanted(self) -> bool:
        if self._config.internal_tls == AUTO:
            return self._ray.num_nodes() > 1
        return self._config.internal_tls != OFF

    def _check_ray_is_private(self) -> None:
        if self._ray.num_nodes() > 1 and os.environ.get("RAY_USE_TLS") != "1":
            logger.warning(
                "Ray sends its token to other hosts unencrypted: any host that reads it and reaches Ray's ports "
                "can run code as Ray's user and read the cluster's secrets. Start Ray with RAY_USE_TLS=1, or keep its "
                "ports unreachable for others"
            )

    def _may_start(self, name: str) -> bool:
        """Raises ClusterError if Ray has ended."""
        if not self._ray.is_up():
            raise ClusterError(f"Ray has ended, and the cluster with it; {self._ray.log_directory} says why")
        return self._nodes is None or self._nodes.has_room(name)

    def _on_model_progress(self, stage: str, fraction: float) -> None:
        done = f" ({100 * fraction:.0f} of 100 %)" if 0 < fraction < 1 else ""
        self._on_progress("model", f"{stage}{done}")


def _held(job: ChangeJob | None) -> tuple[str, ...] | None:
    """Returns the processes that a job needs where they are; None: nothing else may change."""
    if isinstance(job, RestartJob):
        return (job.process,)
    return () if job is None else None
