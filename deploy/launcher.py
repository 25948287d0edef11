"""Starts, watches and stops a cluster: routers and workers, on its own Ray or on one that is there."""

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploy.certificates import given_certificates, make_certificates
from deploy.cluster_config import DEVICES_PER_WORKER, ClusterConfig, WorkerPlan
from deploy.cluster_options import AUTO, OFF
from deploy.hosted_ray import HostedRay
from deploy.local_ray import LocalRay
from deploy.node_placement import NodePlacement, SavedPlacement
from deploy.plan import check_own_classes, plan, router_names, worker_names
from deploy.ports import ClientAddresses, ClusterPorts, ReservedPorts
from deploy.ray_base import RayBase, StartError
from deploy.ray_module import RayActorError, RayError, RayTaskError, ray
from deploy.request_lines import RequestLineServer
from deploy.run_record import default_directory
from deploy.scaling import ScaleJob, Scaling, in_counts
from deploy.supervisor import ProcessKind, Supervisor
from engine.weights.resolve import resolve_model
from router.config import RouterAddresses, RouterConfig
from tandem.config import ROLES, ClusterTls, ClusterTlsFiles
from tandem.logs import log_file
from tandem.rpc.tls import check_tls_files

logger = logging.getLogger(__name__)

# It is told the name of a part of the cluster and what that part is doing.
OnProgress = Callable[[str, str], None]

START_TIMEOUT_S = 1800.0
ROUTER_START_TIMEOUT_S = 60.0
# Until a worker's process is there and answers, whatever it has yet to load.
PROCESS_START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 6.0
# A process that was found running says within this time whether it takes part.
RECOVER_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.2


class ClusterError(Exception):
    """The cluster cannot start or go on; the message is for the person who started it."""


class ConfigurationError(ClusterError):
    """It cannot start as configured: the person who started it can put that right."""


@dataclass(frozen=True)
class ClusterState:
    """What the supervision of a running cluster is made of; Cluster says what each is."""

    cluster_token: str = field(repr=False)
    cluster_tls: ClusterTls | ClusterTlsFiles | None
    model_dir: Path
    ports: ClusterPorts
    router_configs: dict[str, RouterConfig]
    worker_plans: dict[str, WorkerPlan]
    num_starts: dict[str, int]
    nodes: SavedPlacement | None
    has_started: bool


class Cluster:
    """A running cluster. Used as a context manager; every method is called from one thread.

    Attributes:
        addresses: of the clients' ports.
        routers: each router's own addresses, by its name.
        router_ready_s: seconds from the creation of the routers' processes until their ports were open.
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
            on_request_line: with log_requests, called with each line about a request, from a thread of its own.
            hosted: the Ray that this process is an actor of, where it is one; what is started outlives it then.
        """
        self._config = config
        self._on_progress = on_progress
        self._on_request_line = on_request_line
        self._request_lines: RequestLineServer | None = None
        self._hosted = hosted
        self._ray: RayBase = hosted or LocalRay(default_directory())
        # Over several nodes it says which process is where, and has their ports.
        self._nodes: NodePlacement | None = None
        # Actors by name; a process that is started again replaces its actor.
        self._actors: dict[str, Any] = {}
        self._router_configs: dict[str, RouterConfig] = {}
        self._worker_plans: dict[str, WorkerPlan] = {}
        self._num_starts: Counter[str] = Counter()
        self._has_started = False
        self._ports = ReservedPorts()
        self._cluster_ports = ClusterPorts(ClientAddresses("", ""), {})
        self._model_dir = Path()
        # Other threads ask for another number of workers; one change is made at a time.
        self._scale_jobs: queue.SimpleQueue[ScaleJob] = queue.SimpleQueue()
        self._scaling: Scaling | None = None
        # What the cluster's processes read, which nobody may clear away meanwhile.
        self._held = contextlib.ExitStack()
        # The token is made anew for each life of the cluster: who has it may speak to the cluster's processes.
        self.cluster_token = secrets.token_hex(16)
        # So are the certificates by which they know each other, where they speak TLS and no others are given.
        self.cluster_tls: ClusterTls | ClusterTlsFiles | None = None
        self.addresses = ClientAddresses("", "")
        self.routers: dict[str, RouterAddresses] = {}
        self.model_name = ""
        self.router_ready_s = 0.0

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
        """Starts everything and returns when a request would be served.

        Raises:
            ConfigurationError: it cannot be started as configured.
            ClusterError: something else went wrong, such as the death of a process.
        """
        config = self._config
        # What takes no time is checked first, because a model may have to be fetched.
        with _refusals():
            check_own_classes(config)
            ports = ClusterPorts(self.addresses, {}) if config.spans_nodes else self._ports.reserve_all(config)
            check_tls_files(config.tls_cert, config.tls_key, config.tls_client_ca)
            if config.internal_tls_cert:
                self.cluster_tls = given_certificates(
                    config.internal_tls_ca, config.internal_tls_cert, config.internal_tls_key
                )
        ray_first = config.device == "cuda" or config.spans_nodes
        if ray_first:
            # Ray counts the GPUs: that there are too few is said before a model is fetched for them.
            self._init_ray()
        if config.device == "cuda":
            self._check_num_gpus()
        with _refusals():
            self._on_progress("model", "looking at it")
            model_dir = resolve_model(
                config.model,
                config.load_format,
                on_progress=self._on_model_progress,
                # A worker that is started again reads it once more.
                held=self._held,
            )
            if config.spans_nodes:
                assert self._hosted is not None
                self._on_progress("model", "looking at it on each node")
                self._nodes = NodePlacement(
                    config, self._hosted, [name for name, _ in worker_names(config)], router_names(config)
                )
                ports = self._nodes.place(str(model_dir.absolute()))
            router_configs, worker_plans = plan(
                config, model_dir, self.cluster_token, ports, num_threads_of=self._num_threads_of()
            )
        self._model_dir, self._cluster_ports = model_dir, ports
        self.model_name = router_configs[0].model_name
        self.addresses, self.routers = ports.shared, ports.routers
        self._on_progress("model", "ready")
        if config.log_requests:
            self._request_lines = RequestLineServer(self._on_request_line)
            router_configs = [replace(c, request_lines_socket=self._request_lines.name) for c in router_configs]
        if not ray_first:
            self._init_ray()
        if self.cluster_tls is None and self._is_tls_wanted():
            self.cluster_tls = self._made_certificates()
        self._router_configs = {c.router_id: c for c in router_configs}
        self._worker_plans = {p.worker.worker_id: p for p in worker_plans}
        self._save()
        self._start_all()

    def _start_all(self) -> None:
        # All processes start side by side; those that take longest are asked for first.
        starting = {self._start_worker(name): name for name in self._worker_plans}
        starting |= {self._start_router(name): name for name in self._router_configs}
        self._wait_for(starting)
        self._wait_for({self._join_worker(self._actors[name]): name for name in self._worker_plans})
        for ref, name in [(self._join_router(self._actors[name]), name) for name in self._router_configs]:
            self._get(ref, ROUTER_START_TIMEOUT_S, name)
        self._has_started = True
        self._save()

    def recover(self, saved: ClusterState) -> None:
        """Takes over what an earlier process like this one has started, which ended without stopping it: processes that
        take part go on, and no others do. Those that are missing are started when the cluster is supervised. Where the
        cluster was still starting all of it is started again.

        Raises:
            ClusterError: as from `start`.
        """
        assert self._hosted is not None
        self.cluster_token, self.cluster_tls = saved.cluster_token, saved.cluster_tls
        self._model_dir = saved.model_dir
        self._cluster_ports = saved.ports
        self.addresses, self.routers = saved.ports.shared, saved.ports.routers
        self._router_configs, self._worker_plans = saved.router_configs, saved.worker_plans
        self._num_starts = Counter(saved.num_starts)
        first = next(iter(self._router_configs.values()))
        self.model_name = first.model_name
        if saved.nodes is not None:
            self._nodes = NodePlacement.restored(self._config, self._hosted, saved.nodes)
        else:
            self._ports.reserve_again(saved.ports)
        if self._config.log_requests:
            self._request_lines = RequestLineServer(self._on_request_line, first.request_lines_socket)
        with contextlib.suppress(ValueError, OSError):
            resolve_model(self._config.model, self._config.load_format, held=self._held)
        self._has_started = saved.has_started
        found = self._hosted.find_actors() if saved.has_started else {}
        asked = {}
        for name in (*self._router_configs, *self._worker_plans):
            if (latest := max(found.pop(name, {}).items(), default=None)) is not None:
                self._actors[name] = actor = latest[1]
                asked[name] = self._join_router(actor) if name in self._router_configs else actor.progress.remote()
        for name, ref in asked.items():
            try:
                said = ray.get(ref, timeout=RECOVER_TIMEOUT_S)
                takes_part = name in self._router_configs or said == "ready"
            except TimeoutError:
                # One that is busy is for the supervision to judge.
                takes_part = True
            except RayError:
                takes_part = False
            if not takes_part:
                ray.kill(self._actors.pop(name))
        holders = self._nodes.holders() if self._nodes is not None else []
        self._hosted.end_all(besides=[*self._actors.values(), *holders])
        if not saved.has_started:
            self._start_all()

    def supervise(self, stop: threading.Event) -> None:
        """Keeps routers and workers alive until `stop` is set: one that dies is started again. What `scale` asks for is
        done here.

        Raises:
            ClusterError: Ray has ended, with which all of them die.
        """
        router = ProcessKind(
            self._start_router,
            self._join_router,
            lambda actor: actor.probe.remote(),
            probe_interval_s=1.0,
            silence_limit_s=5.0,
            start_limit_s=ROUTER_START_TIMEOUT_S,
        )
        worker = ProcessKind(
            self._start_worker,
            self._join_worker,
            lambda actor: actor.progress.remote(),
            probe_interval_s=2.0,
            silence_limit_s=60.0,
            start_limit_s=START_TIMEOUT_S,
            mapped=lambda actor: actor.mapped_workers.remote(),
        )
        # One that cannot be reached may serve all the same; Ray gives up its node, if need be, and it sees to itself
        # whether its loop turns.
        far_router = replace(router, silence_limit_s=worker.silence_limit_s)
        is_here = self._nodes.is_here if self._nodes is not None else lambda _: True
        routers = {name: router if is_here(name) else far_router for name in self._router_configs}
        kinds = routers | dict.fromkeys(self._worker_plans, worker)
        running = {name: kind for name, kind in kinds.items() if name in self._actors}
        supervisor = Supervisor(self._actors, running, self._may_start)
        for name in kinds.keys() - running.keys():
            supervisor.add(name, kinds[name])
        try:
            supervisor.run(stop, lambda: self._take_turn(supervisor, worker))
        finally:
            self._give_up_scaling()

    def scale(self, counts: Mapping[str, int]) -> ScaleJob:
        """Asks for other numbers of workers, of each role that is named; may be called from any thread, and is done
        while the cluster is supervised. New workers are started first. One that is too many, those of the highest
        numbers, gets no new requests, and ends when those that it has are over or drain_timeout_s have passed: what it
        had then is begun again elsewhere."""
        job = ScaleJob(counts)
        self._scale_jobs.put(job)
        return job

    def drain(self, timeout_s: float) -> int:
        """Takes no new requests from now on and waits for those in hand; returns how many are left. What a router had
        that has just died is not in hand any more."""
        refs = [actor.drain.remote(timeout_s) for actor in self._running_routers()]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s + STOP_TIMEOUT_S) if refs else ([], [])
        num_left = 0
        for ref in answered:
            with contextlib.suppress(RayError):
                num_left += ray.get(ref)
        return num_left

    def stop(self) -> None:
        """Stops every process this cluster started."""
        self._ports.close()
        if ray.is_initialized() and self._ray.is_up():
            # Routers stop first: what is cut short then is told so, and not that its worker is gone.
            for names in (self._router_configs, self._worker_plans):
                refs = [self._actors[name].stop.remote() for name in names if name in self._actors]
                if refs:
                    ray.wait(refs, num_returns=len(refs), timeout=STOP_TIMEOUT_S / 2)
            # A Ray that goes on would keep them for a while.
            for actor in self._actors.values():
                ray.kill(actor)
            self._actors = {}
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

    def _take_turn(self, supervisor: Supervisor, kind: ProcessKind) -> None:
        if self._scaling is None:
            with contextlib.suppress(queue.Empty):
                job = self._scale_jobs.get_nowait()
                try:
                    self._scaling = self._plan_scaling(job, supervisor, kind)
                except (ValueError, ClusterError) as error:
                    job.finish(str(error), is_usage=True)
        if self._scaling is not None and self._scaling.take_turn():
            self._scaling = None

    def _plan_scaling(self, job: ScaleJob, supervisor: Supervisor, kind: ProcessKind) -> Scaling:
        running = Counter(p.worker.role for p in self._worker_plans.values())
        counts = dict.fromkeys(ROLES, 0) | running | dict(job.counts)
        config = replace(self._config, **in_counts(counts), num_routers=len(self._router_configs))
        num_running = len(self._worker_plans)
        _, plans = plan(
            config, self._model_dir, self.cluster_token, self._cluster_ports, num_running, self._num_threads_of()
        )
        wanted = {p.worker.worker_id: p for p in plans}
        joining = {name: p for name, p in wanted.items() if name not in self._worker_plans}
        leaving = [name for name in self._worker_plans if name not in wanted]
        has_room = self._check_room(len(joining), len(leaving))
        return Scaling(job, self, supervisor, kind, joining, leaving, join_first=has_room)

    def _check_room(self, num_joining: int, num_leaving: int) -> bool:
        """Whether there is room for so many more workers before others leave; raises ConfigurationError if there is
        not even then."""
        needs = {"GPU": DEVICES_PER_WORKER} if self._config.device == "cuda" else {}
        if self._config.ray_address:
            needs["CPU"] = 1
        has_room = True
        for resource, each in needs.items():
            free = self._ray.num_free(resource)
            if free + each * num_leaving < each * num_joining:
                raise ConfigurationError(
                    f"no room for {num_joining} more workers: each takes {each} {resource}, and Ray has {free} left"
                    + ("" if self._config.spans_nodes else " on this host")
                    + "; ask for fewer, or give Ray more"
                )
            has_room = has_room and free >= each * num_joining
        return has_room

    def _give_up_scaling(self) -> None:
        if self._scaling is not None:
            self._scaling.give_up()
            self._scaling = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._scale_jobs.get_nowait().finish("the cluster is stopping")

    # --- what a change of the number of workers is made of (deploy/scaling.py) ---

    @property
    def drain_timeout_s(self) -> float:
        return self._config.drain_timeout_s

    @property
    def worker_names(self) -> list[str]:
        return list(self._worker_plans)

    def add_workers(self, plans: Mapping[str, WorkerPlan]) -> None:
        """These are part of the cluster from now on; who supervises it starts them."""
        self._worker_plans |= plans
        if self._nodes is not None:
            self._nodes.add_workers(list(plans))
        self._save()

    def remove_workers(self, names: Sequence[str]) -> None:
        """Ends what is left of these."""
        for name in names:
            del self._worker_plans[name]
            if (actor := self._actors.pop(name, None)) is not None:
                ray.kill(actor)
        if self._nodes is not None:
            self._nodes.remove_workers(names)
        self._save()

    def tell_routers(self, names: Sequence[str]) -> list[Any]:
        """Has the routers know these workers alone as those that are to be there; returns a reference to each one's
        answer, as RouterActor.set_workers has it."""
        planned = {name: self._worker_plans[name].worker.role for name in names}
        self._router_configs = {name: replace(c, workers=planned) for name, c in self._router_configs.items()}
        return [actor.set_workers.remote(planned) for actor in self._running_routers()]

    def actor(self, name: str) -> Any:
        """The process of that name; None: it is not there yet."""
        return self._actors.get(name)

    def _running_routers(self) -> list[Any]:
        """The actors of all routers but those that were missing when this process took over, and wait for their nodes:
        they hear of everything when they start."""
        return [self._actors[name] for name in self._router_configs if name in self._actors]

    def _save(self) -> None:
        """Whoever supervises after this process has died begins with this."""
        if self._hosted is not None:
            self._hosted.save(
                ClusterState(
                    self.cluster_token,
                    self.cluster_tls,
                    self._model_dir,
                    self._cluster_ports,
                    self._router_configs,
                    self._worker_plans,
                    dict(self._num_starts),
                    self._nodes.saved() if self._nodes is not None else None,
                    self._has_started,
                )
            )

    def _init_ray(self) -> None:
        self._on_progress("ray", "starting")
        try:
            with _refusals():
                self._ray.start(self._config.num_workers + self._config.num_routers_started)
        except StartError as error:
            raise ClusterError(str(error)) from error
        self._on_progress("ray", "ready")

    def _is_tls_wanted(self) -> bool:
        """Whether what the processes say to each other is to be encrypted, where certificates are not given."""
        if self._config.internal_tls == AUTO:
            return self._ray.num_nodes() > 1
        return self._config.internal_tls != OFF

    def _made_certificates(self) -> ClusterTls:
        if self._ray.num_nodes() > 1 and os.environ.get("RAY_USE_TLS") != "1":
            logger.warning(
                "Ray carries the key of the cluster's certificates to other hosts in the clear, with its token and the "
                "API keys: start Ray with RAY_USE_TLS=1, or give certificates (--internal-tls-cert)"
            )
        return make_certificates()

    def _check_ray(self) -> None:
        if not self._ray.is_up():
            raise ClusterError(f"Ray has ended, and the cluster with it; {self._ray.log_directory} says why")

    def _may_start(self, name: str) -> bool:
        """Whether there is a place for a process that is to be started again; raises ClusterError if Ray has ended."""
        self._check_ray()
        return self._nodes is None or self._nodes.has_room(name)

    def _num_threads_of(self) -> Callable[[str], int] | None:
        return None if self._nodes is None or self._config.num_threads else self._nodes.num_threads

    def _on_model_progress(self, stage: str, fraction: float) -> None:
        done = f" ({100 * fraction:.0f} of 100 %)" if 0 < fraction < 1 else ""
        self._on_progress("model", f"{stage}{done}")

    def _check_num_gpus(self) -> None:
        """Raises ConfigurationError if there are fewer GPUs than workers take."""
        num_gpus = self._ray.num_free("GPU")
        if num_gpus >= self._config.num_devices:
            return
        advice = f"use fewer workers (num_both 1 needs {DEVICES_PER_WORKER}) or set `device` to cpu"
        if self._config.ray_address:
            where = f"the Ray at {self._config.ray_address} has {num_gpus} GPUs left"
            where += "" if self._config.spans_nodes else " on this host"
        elif num_gpus == 0:
            raise ConfigurationError(
                "device cuda needs NVIDIA GPUs, and none is visible here (see nvidia-smi and CUDA_VISIBLE_DEVICES); "
                "set `device` to cpu"
            )
        else:
            where = f"{num_gpus} GPUs here"
        raise ConfigurationError(
            f"device cuda takes {DEVICES_PER_WORKER} GPU for each worker: {self._config.num_workers} workers, but "
            f"{where}; {advice}"
        )

    def _start_router(self, name: str) -> Any:
        """Starts a router's process; returns the reference that ends when its own ports are open."""
        from deploy.router_actor import RouterActor

        self._on_progress(name, "starting")
        config = replace(self._router_configs[name], num_restarts=self._num_starts[name], cluster_tls=self.cluster_tls)
        self._num_starts[name] += 1
        actor = self._actors[name] = self._actor_class(name, RouterActor).remote(config)
        return actor.start.remote(*(self._nodes.ports_of(name) if self._nodes is not None else ()))

    def _start_worker(self, name: str) -> Any:
        """Starts a worker's process and has it load; returns the reference that ends with the loading."""
        from deploy.worker_actor import WorkerActor

        plan = self._worker_plans[name]
        worker = replace(plan.worker, num_restarts=self._num_starts[name], cluster_tls=self.cluster_tls)
        plan = replace(plan, worker=worker)
        self._num_starts[name] += 1
        self._on_progress(name, "starting")
        num_gpus = plan.worker.engine.num_devices if plan.worker.engine.device == "cuda" else 0
        actor = self._actors[name] = self._actor_class(name, WorkerActor, num_gpus).remote(plan)
        return actor.start.remote()

    def _actor_class(self, name: str, cls: type, num_gpus: int = 0) -> Any:
        """A class as a Ray actor: three concurrent calls, so that it can be asked for progress and to stop while it
        starts; and no restart but ours. Where it has a name, each life of it has another: Ray frees a dead actor's name
        too late for its successor."""
        self._save()
        options = self._ray.actor_options() if self._nodes is None else self._nodes.actor_options(name)
        options |= self._ray.naming(f"{name}.{self._num_starts[name]}")
        return ray.remote(cls).options(**options, num_gpus=num_gpus, max_concurrency=3, max_restarts=0)

    def _join_router(self, actor: Any) -> Any:
        """Has a router take part. Since it was told what workers there are, others may have been asked for."""
        planned = {name: plan.worker.role for name, plan in self._worker_plans.items()}
        if self._scaling is not None:
            planned = {name: planned[name] for name in self._scaling.planned}
        actor.set_workers.remote(planned)
        return actor.open_shared_ports.remote()

    def _join_worker(self, actor: Any) -> Any:
        """Has a worker that is loaded take part."""
        return actor.connect.remote([addresses.cluster for addresses in self.routers.values()])

    def _wait_for(self, refs: dict[Any, str]) -> None:
        """Waits for start-up steps of several parts, showing the workers' progress. Whatever ends is seen at once: a
        worker that imports answers late what it does."""
        began = ask_at = time.monotonic()
        address = self._config.ray_address
        waiting, asked = dict(refs), dict[Any, str]()
        silent = set(self._worker_plans)
        while waiting:
            now = time.monotonic()
            if late := [name for name in waiting.values() if now - began > self._start_limit_s(name)]:
                raise ClusterError(
                    f"{', '.join(late)} did not start within {self._start_limit_s(late[0]):.0f} s: this host may have "
                    "too much else to do; if not, logs of processes say more (--log-dir)"
                )
            if silent and now - began > PROCESS_START_TIMEOUT_S:
                raise ClusterError(
                    f"no process for {', '.join(sorted(silent))} within {PROCESS_START_TIMEOUT_S:.0f} s"
                    + (f": others may have taken what the Ray at {address} had left" if address else "")
                )
            if now >= ask_at:
                ask_at = now + POLL_INTERVAL_S
                asked |= {
                    self._actors[name].progress.remote(): name
                    for name in self._worker_plans.keys() - set(asked.values())
                }
            done, _ = ray.wait([*waiting, *asked], num_returns=1, timeout=ask_at - now, fetch_local=False)
            for ref in done:
                if ref in asked:
                    name = asked.pop(ref)
                    self._show_progress(name, ref)
                    silent.discard(name)
                    continue
                name = waiting.pop(ref)
                self._get(ref, STOP_TIMEOUT_S, name)
                if name in self._router_configs:
                    self._on_progress(name, "ready")
                    self.router_ready_s = time.monotonic() - began
                    logger.info("%s ready after %.2f s", name, self.router_ready_s)
        # What they were asked before may have been answered before they ended.
        for name, ref in [(name, self._actors[name].progress.remote()) for name in self._worker_plans]:
            self._show_progress(name, ref)

    def _start_limit_s(self, name: str) -> float:
        return ROUTER_START_TIMEOUT_S if name in self._router_configs else START_TIMEOUT_S

    def _show_progress(self, worker_id: str, ref: Any) -> None:
        self._on_progress(worker_id, self._get(ref, STOP_TIMEOUT_S, worker_id))

    def _get(self, ref: Any, timeout_s: float, name: str) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            is_refusal = isinstance(error, RayTaskError) and isinstance(error.cause, ValueError)
            kind = ConfigurationError if is_refusal else ClusterError
            raise kind(f"{name}: {self._reason(error, name)}") from error

    def _reason(self, error: Exception, name: str) -> str:
        """What a person needs of an error that crossed the boundary of the process of that name."""
        if isinstance(error, RayTaskError):
            return str(error.cause)
        if isinstance(error, RayActorError):
            directory = self._config.log_dir
            log = log_file(directory, name) if directory else self._ray.log_directory
            return f"its process died; {log} says why"
        return str(error) or type(error).__name__


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Errors within it are what the person who started the cluster can put right."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error
