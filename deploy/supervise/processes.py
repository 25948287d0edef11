"""Starts the processes of a cluster and lets them join."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.config import WORKER_PROBE_INTERVAL_S, WORKER_SILENCE_LIMIT_S, ClusterTls, ClusterTlsFiles
from tandem.deploy.config.bounds import SizedKind
from tandem.deploy.config.cluster_config import ClusterConfig, WorkerPlan
from tandem.deploy.errors import ClusterError, ConfigurationError
from tandem.deploy.host.memory_kills import MemoryKills
from tandem.deploy.nodes.node_placement import NodePlacement
from tandem.deploy.on_ray.ray_base import RayBase
from tandem.deploy.on_ray.ray_module import RayActorError, RayError, RayTaskError, ray
from tandem.deploy.supervise.stores import Stores
from tandem.deploy.supervise.supervisor import ProcessKind
from tandem.logs import log_file
from tandem.router.config import RouterConfig

logger = logging.getLogger(__name__)

# Called with part and stage.
OnProgress = Callable[[str, str], None]

START_TIMEOUT_S = 1800.0
ROUTER_START_TIMEOUT_S = 60.0
PROCESS_START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 6.0
STOP_TIMEOUT_S = 3.0
RECOVER_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.2


class Processes:
    """The configuration and the actor of each process, for one thread.

    Attributes:
        router_configs, worker_plans: configurations for the next start, by name.
        stores: the page stores, if the cluster has any.
        routers: names of the routers that are to run. The others have their ports, for a later start.
        router_ready_s: seconds from the creation of the router processes until their ports were open.
        start_s: seconds from the order of a process to its readiness, as last measured, by kind.
    """

    def __init__(
        self,
        config: ClusterConfig,
        ray_in_use: RayBase,
        on_progress: OnProgress,
        on_request_line: Callable[[str], None],
        before_start: Callable[[], None],
        stores: Stores | None = None,
    ) -> None:
        """Args: stores: None: this host's."""
        self._config = config
        self._ray = ray_in_use
        self._on_progress = on_progress
        self._on_request_line = on_request_line
        self._before_start = before_start
        self.actors: dict[str, Any] = {}
        self.router_configs: dict[str, RouterConfig] = {}
        self.routers: list[str] = []
        self.worker_plans: dict[str, WorkerPlan] = {}
        self.stores = stores or Stores()
        self.num_starts: Counter[str] = Counter()
        # Ray logs the traceback of a failed call whose reference is dropped unread, so `stop` reads these.
        self._unread: list[Any] = []
        self.router_ready_s = 0.0
        self.start_s: dict[SizedKind, float] = {}
        self._memory_kills = MemoryKills()
        self._nodes: NodePlacement | None = None
        self._cluster_tls: ClusterTls | ClusterTlsFiles | None = None

    def configure(
        self,
        router_configs: Mapping[str, RouterConfig],
        worker_plans: Mapping[str, WorkerPlan],
        nodes: NodePlacement | None,
        cluster_tls: ClusterTls | ClusterTlsFiles | None,
        *,
        num_starts: Mapping[str, int] | None = None,
        routers: Sequence[str] = (),
    ) -> None:
        """Args: routers: names of those that are to run; (): all."""
        self.router_configs, self.worker_plans = dict(router_configs), dict(worker_plans)
        self.routers = list(routers or router_configs)
        self.num_starts = Counter(num_starts or {})
        self._nodes, self._cluster_tls = nodes, cluster_tls

    def start_all(self) -> None:
        """Returns when all have joined.

        Raises:
            ConfigurationError: a process refuses its configuration.
            ClusterError: another failure.
        """
        starting = {self.start_store(name): name for name in self.stores.configs}
        starting |= {self.start_worker(name): name for name in self.worker_plans}
        starting |= {self.start_router(name): name for name in self.routers}
        self.wait_for(starting)
        self.wait_for({self.join_worker(self.actors[name]): name for name in self.worker_plans})
        opening = {self.join_router(self.actors[name]): name for name in self.routers}
        self._unread = [*opening]
        for ref, name in opening.items():
            self.get(ref, ROUTER_START_TIMEOUT_S, name)
        self._unread = []

    def take_over(self, found: Mapping[str, Mapping[int, Any]]) -> None:
        """Keeps the latest joined actors, and kills all others. Args: found: actors by name and number of the start."""
        asked = {}
        kinds, _ = self.kinds()
        for name in (*self.routers, *self.worker_plans, *self.stores.configs):
            if (latest := max(found.get(name, {}).items(), default=None)) is not None:
                self.actors[name] = actor = latest[1]
                asked[name] = self.join_router(actor) if name in self.router_configs else kinds[name].probe(actor)
        for name, ref in asked.items():
            try:
                said = ray.get(ref, timeout=RECOVER_TIMEOUT_S)
                takes_part = name not in self.worker_plans or said == "ready"
            except TimeoutError:
                # Busy: the supervisor will probe it.
                takes_part = True
            except RayError:
                takes_part = False
            if not takes_part:
                ray.kill(self.actors.pop(name))

    def start_router(self, name: str) -> Any:
        """Returns a reference: the router's own ports are open."""
        from tandem.deploy.actors.router_actor import RouterActor

        self._on_progress(name, "starting")
        config = replace(
            self.router_configs[name],
            stores=tuple(self.stores.configs),
            num_restarts=self.num_starts[name],
            cluster_tls=self._cluster_tls,
        )
        actor = self._create(name, RouterActor, config)
        return actor.start.remote(*(self._nodes.ports_of(name) if self._nodes is not None else ()))

    def start_worker(self, name: str) -> Any:
        """Returns a reference: the worker has loaded."""
        from tandem.deploy.actors.worker_actor import WorkerActor

        plan = self.worker_plans[name]
        worker = replace(
            plan.worker,
            num_restarts=self.num_starts[name],
            cluster_tls=self._cluster_tls,
            store=self.stores.access,
            # May be newer than the plan's.
            api_keys=self._any_router_config.api_keys,
        )
        self._on_progress(name, "starting")
        order = replace(plan, worker=worker, stores=self.stores.access_by_node)
        num_gpus = self._config.gpus_of(worker.role)
        actor = self._create(name, WorkerActor, order, num_gpus, worker.engine.degree)
        return actor.start.remote()

    def start_store(self, name: str) -> Any:
        """Returns a reference: the store's port is open."""
        from tandem.deploy.actors.store_actor import StoreActor

        self._on_progress(name, "starting")
        keys = self._any_router_config.api_keys
        config = self.stores.config(name, self.num_starts[name], self._cluster_tls, keys)
        # First, because the state that `_create` saves includes it.
        waited_for = self.stores.prepare_start(name)
        return self._create(name, StoreActor, config).start.remote(*waited_for)

    def _create(self, name: str, cls: type, order: object, num_gpus: float = 0, num_ranks: int = 1) -> Any:
        actor_class = self._actor_class(name, cls, num_gpus, num_ranks)
        self.num_starts[name] += 1
        actor = self.actors[name] = self._ray.create(actor_class, order)
        return actor

    def join_router(self, actor: Any) -> Any:
        actor.set_workers.remote(self._any_router_config.workers)
        return actor.open_shared_ports.remote()

    def join_worker(self, actor: Any) -> Any:
        return actor.connect.remote(self._router_addresses())

    def _router_addresses(self) -> list[str]:
        addresses = self._any_router_config.routers
        return [addresses[name].cluster for name in self.routers]

    def plan_workers(self, plans: Mapping[str, WorkerPlan]) -> None:
        self.worker_plans |= plans

    def end_workers(self, names: Sequence[str]) -> None:
        for name in names:
            del self.worker_plans[name]
            if (actor := self.actors.pop(name, None)) is not None:
                ray.kill(actor)
        if self._nodes is not None:
            self._nodes.release(names)

    def end_router(self, name: str) -> None:
        self.routers.remove(name)
        if (actor := self.actors.pop(name, None)) is not None:
            ray.kill(actor)

    def tell_workers(self) -> list[Any]:
        """Tells the workers the routers that are to run; returns references to the answers."""
        addresses = self._router_addresses()
        running = [actor for name in self.worker_plans if (actor := self.actors.get(name)) is not None]
        return [actor.set_routers.remote(addresses) for actor in running]

    def tell_routers(self, names: Sequence[str]) -> list[Any]:
        """Returns references to the answers of RouterActor.set_workers."""
        planned = {name: self.worker_plans[name].worker.role for name in names}
        self.router_configs = {name: replace(c, workers=planned) for name, c in self.router_configs.items()}
        return [actor.set_workers.remote(planned) for actor in self.running_routers().values()]

    def set_may_be_empty(self, *, may_be_empty: bool) -> None:
        """Tells routers that start later whether the cluster may have no worker until a request waits for one."""
        configs = self.router_configs.items()
        self.router_configs = {name: replace(c, starts_from_zero=may_be_empty) for name, c in configs}

    def use_keys(self, keys: tuple[str, ...]) -> None:
        """Sets the API keys of processes that start later and cannot read the key file then."""
        self.router_configs = {name: replace(c, api_keys=keys) for name, c in self.router_configs.items()}

    def look_at_files(self) -> None:
        for actor in self.running_routers().values():
            actor.look_at_files.remote()

    def kinds(self) -> tuple[dict[str, ProcessKind], ProcessKind]:
        """Returns the kind of each process, by name, and of any new worker."""
        router = ProcessKind(
            self.start_router,
            self.join_router,
            lambda actor: actor.probe.remote(),
            probe_interval_s=1.0,
            silence_limit_s=5.0,
            start_limit_s=ROUTER_START_TIMEOUT_S,
            answered=self._show_request_lines,
        )
        worker = ProcessKind(
            self.start_worker,
            self.join_worker,
            lambda actor: actor.progress.remote(),
            probe_interval_s=WORKER_PROBE_INTERVAL_S,
            silence_limit_s=WORKER_SILENCE_LIMIT_S,
            start_limit_s=START_TIMEOUT_S,
            mapped=lambda actor: actor.mapped_workers.remote(),
        )
        # An unreachable router may still serve, and watches its own event loop.
        far_router = replace(router, silence_limit_s=worker.silence_limit_s)
        is_here = self._nodes.is_here if self._nodes is not None else lambda _: True
        routers = {name: router if is_here(name) else far_router for name in self.routers}
        stores = {
            name: kind if is_here(name) else replace(kind, silence_limit_s=worker.silence_limit_s)
            for name, kind in self.stores.kinds(self.start_store).items()
        }
        return routers | stores | dict.fromkeys(self.worker_plans, worker), worker

    def drain(self, timeout_s: float) -> int:
        refs = [actor.drain.remote(timeout_s) for actor in self.running_routers().values()]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s + ANSWER_TIMEOUT_S) if refs else ([], [])
        num_left = 0
        for ref in answered:
            with contextlib.suppress(RayError):
                num_left += ray.get(ref)
        self._ask_request_lines()
        return num_left

    def stop(self) -> None:
        # Routers stop first, so that clients hear of a shutdown instead of a lost worker.
        for names in (self.router_configs, self.worker_plans, self.stores.configs):
            refs = [self.actors[name].stop.remote() for name in names if name in self.actors]
            ended, _ = ray.wait(refs, num_returns=len(refs), timeout=STOP_TIMEOUT_S) if refs else ([], [])
            if names is self.router_configs:
                for ref in ended:
                    with contextlib.suppress(RayError):
                        self._show_request_lines(ray.get(ref))
        # A joined Ray would keep the actors for a while.
        for actor in self.actors.values():
            ray.kill(actor)
        self.actors = {}
        refs, self._unread = self._unread, []
        # A killed actor's calls end at once.
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=STOP_TIMEOUT_S) if refs else ([], [])
        for ref in ended:
            with contextlib.suppress(RayError):
                ray.get(ref)

    def _ask_request_lines(self) -> None:
        keeping = [self.actors[n] for n, c in self.router_configs.items() if c.keeps_request_lines and n in self.actors]
        refs = [actor.probe.remote() for actor in keeping]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=ANSWER_TIMEOUT_S) if refs else ([], [])
        for ref in answered:
            with contextlib.suppress(RayError, TimeoutError):
                self._show_request_lines(ray.get(ref))

    def _show_request_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._on_request_line(line)

    def wait_for(self, refs: dict[Any, str]) -> None:
        """Notices a finished reference at once, even while an importing worker does not answer."""
        began = ask_at = time.monotonic()
        address = self._config.ray_address
        waiting, asked = dict(refs), dict[Any, str]()
        self._unread = [*refs]
        silent = set(self.worker_plans)
        while waiting:
            now = time.monotonic()
            if late := [name for name in waiting.values() if now - began > self._start_limit_s(name)]:
                raise ClusterError(
                    f"{', '.join(late)} did not start within {self._start_limit_s(late[0]):.0f} s: this host may be "
                    "overloaded; if not, see the logs of the processes (--log-dir)"
                )
            if silent and now - began > PROCESS_START_TIMEOUT_S:
                raise ClusterError(
                    f"no process for {', '.join(sorted(silent))} within {PROCESS_START_TIMEOUT_S:.0f} s"
                    + (f": other jobs may use the resources of the Ray at {address}" if address else "")
                )
            if now >= ask_at:
                ask_at = now + POLL_INTERVAL_S
                asked |= {
                    self.actors[name].progress.remote(): name for name in self.worker_plans.keys() - set(asked.values())
                }
            done, _ = ray.wait([*waiting, *asked], num_returns=1, timeout=ask_at - now, fetch_local=False)
            for ref in done:
                if ref in asked:
                    name = asked.pop(ref)
                    self._show_progress(name, ref)
                    silent.discard(name)
                    continue
                name = waiting.pop(ref)
                self.get(ref, ANSWER_TIMEOUT_S, name)
                if (plan := self.worker_plans.get(name)) is not None:
                    # Loading takes longer than joining, which this also waits for.
                    self.start_s[plan.kind] = max(self.start_s.get(plan.kind, 0.0), time.monotonic() - began)
                if name in self.stores.configs:
                    self._on_progress(name, "ready")
                elif name in self.router_configs:
                    self._on_progress(name, "ready")
                    self.router_ready_s = self.start_s["router"] = time.monotonic() - began
                    logger.info("%s ready after %.2f s", name, self.router_ready_s)
        self._unread = []
        # Earlier answers may miss the last stage.
        for name, ref in [(name, self.actors[name].progress.remote()) for name in self.worker_plans]:
            self._show_progress(name, ref)

    def get(self, ref: Any, timeout_s: float, name: str) -> Any:
        """
        Raises:
            ConfigurationError: the process refuses its configuration.
            ClusterError: the process failed or did not answer.
        """
        try:
            return ray.get(ref, timeout=timeout_s)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            is_refusal = isinstance(error, RayTaskError) and isinstance(error.cause, ValueError)
            kind = ConfigurationError if is_refusal else ClusterError
            raise kind(f"{name}: {self._reason(error, name)}") from error

    def _actor_class(self, name: str, cls: type, num_gpus: float = 0, num_ranks: int = 1) -> Any:
        """Returns an actor class without restarts by Ray. Concurrent calls allow progress and stop during the start.

        Each start has its own actor name: Ray frees the name of a dead actor late.
        """
        self._before_start()
        options = self._ray.actor_options() if self._nodes is None else self._nodes.actor_options(name)
        options["num_cpus"] *= num_ranks
        options |= self._ray.naming(f"{name}.{self.num_starts[name]}")
        return ray.remote(cls).options(**options, num_gpus=num_gpus, max_concurrency=3, max_restarts=0)

    @property
    def _any_router_config(self) -> RouterConfig:
        return next(iter(self.router_configs.values()))

    def running_routers(self) -> dict[str, Any]:
        """Returns the started routers; after a takeover, others may wait for their nodes."""
        return {name: self.actors[name] for name in self.routers if name in self.actors}

    def _start_limit_s(self, name: str) -> float:
        return START_TIMEOUT_S if name in self.worker_plans else ROUTER_START_TIMEOUT_S

    def _show_progress(self, worker_id: str, ref: Any) -> None:
        self._on_progress(worker_id, self.get(ref, ANSWER_TIMEOUT_S, worker_id))

    def _reason(self, error: Exception, name: str) -> str:
        if isinstance(error, RayTaskError):
            return str(error.cause)
        if isinstance(error, RayActorError):
            directory = self._config.log_dir
            log = log_file(directory, name) if directory else self._ray.log_directory
            why = self._memory_kills.explanation()
            return f"its process died: {why}" if why else f"its process died; {log} says why"
        return str(error) or type(error).__name__
