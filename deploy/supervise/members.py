"""The processes that take part in a cluster, and how they join and leave it. For the supervising thread."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.config import WORKER_KINDS, WorkerKind
from tandem.deploy.config.bounds import Bounds, SizedKind, has_zero, in_fields
from tandem.deploy.config.cluster_config import ClusterConfig, WorkerPlan
from tandem.deploy.config.cluster_options import OFF, ON
from tandem.deploy.errors import ClusterError
from tandem.deploy.host.ports import ClusterPorts
from tandem.deploy.nodes.node_placement import NodePlacement
from tandem.deploy.on_ray.autoscaler import has_autoscaler
from tandem.deploy.on_ray.ray_base import RayBase
from tandem.deploy.plan import plan, role_of
from tandem.deploy.supervise.change import Change, ChangeJob
from tandem.deploy.supervise.evacuating import Evacuating, RouterLeaving, may_leave
from tandem.deploy.supervise.processes import Processes
from tandem.deploy.supervise.room import Leaving, has_room
from tandem.deploy.supervise.router_changes import end_router, join_router, leave_router
from tandem.deploy.supervise.scaling import Joining, ScaleJob, Scaling, check_kinds, end_steps, leave_steps
from tandem.deploy.supervise.sizing import kind_of, name_of, number_of
from tandem.deploy.supervise.supervisor import Supervisor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Basis:
    """The parts of a started cluster that plans of further processes need."""

    config: ClusterConfig
    model_dir: Path
    cluster_token: str
    ports: ClusterPorts
    nodes: NodePlacement | None


class Members:
    """Implements Scaled (scaling.py), Restarted (restarting.py) and Sized (sizing.py)."""

    def __init__(
        self,
        basis: Basis,
        bounds: dict[SizedKind, Bounds],
        ray: RayBase,
        processes: Processes,
        supervisor: Supervisor,
        save: Callable[[], None],
    ) -> None:
        self._basis = basis
        self._ray = ray
        self._processes = processes
        self._supervisor = supervisor
        self._save = save
        self._leaving: set[str] = set()
        # Kinds of workers that have or await their room, and are not planned yet.
        self._reserved: dict[str, WorkerKind] = {}
        self._node_timeout_s = 0.0
        # Processes whose node goes, and that a change takes care of.
        self._evacuated: set[str] = set()
        kinds, self._worker_kind = processes.kinds()
        self._router_kind = next(kinds[name] for name in processes.routers)
        self._bounds = bounds

    # --- Scaled, Restarted ---

    @property
    def drain_timeout_s(self) -> float:
        return self._basis.config.drain_timeout_s

    @property
    def node_timeout_s(self) -> float:
        return self._node_timeout_s

    def reserve(self, names: Sequence[str]) -> None:
        self._reserved |= {name: kind_of(name) for name in names}
        if self._basis.nodes is not None:
            self._basis.nodes.reserve(names)
            self._save()

    def is_placed(self, name: str) -> bool:
        return self._basis.nodes is None or self._basis.nodes.is_placed(name)

    def need_of(self, name: str) -> str:
        return self._basis.nodes.need_of(name) if self._basis.nodes is not None else ""

    def release(self, names: Sequence[str]) -> None:
        if not names:
            return
        for name in names:
            self._reserved.pop(name, None)
        if self._basis.nodes is not None:
            self._basis.nodes.release(names)
            self._save()

    def is_planned(self, name: str) -> bool:
        return name in self._processes.worker_plans

    def add_workers(self, plans: Mapping[str, WorkerPlan]) -> None:
        for name in plans:
            self._reserved.pop(name, None)
        self._processes.plan_workers(plans)
        self._save()

    def remove_workers(self, names: Sequence[str]) -> None:
        self._processes.end_workers([name for name in names if self.is_planned(name)])
        self._leaving.difference_update(names)
        self._save()

    def begin_leaving(self, names: Collection[str]) -> None:
        self._leaving.update(names)

    def let_stay(self, names: Collection[str]) -> None:
        self._leaving.difference_update(names)

    def tell_routers(self) -> list[Any]:
        return self._processes.tell_routers([n for n in self._processes.worker_plans if n not in self._leaving])

    def actor(self, name: str) -> Any:
        return self._processes.actors.get(name)

    # --- routers (router_changes.py) ---

    def add_router(self, name: str) -> None:
        self._processes.routers.append(name)
        self._save()

    def remove_router(self, name: str) -> None:
        self._processes.end_router(name)
        self._save()

    def tell_workers(self) -> list[Any]:
        return self._processes.tell_workers()

    # --- Sized ---

    @property
    def bounds(self) -> Mapping[SizedKind, Bounds]:
        return self._bounds

    @property
    def start_s(self) -> dict[SizedKind, float]:
        return self._processes.start_s

    def names(self, kind: SizedKind) -> list[str]:
        if kind == "router":
            return list(self._processes.routers)
        planned = [name for name, worker in self._processes.worker_plans.items() if worker.kind == kind]
        return planned + [name for name, other in self._reserved.items() if other == kind]

    @property
    def has_spare_routers(self) -> bool:
        return len(self._processes.routers) < len(self._processes.router_configs)

    def is_evacuated(self, name: str) -> bool:
        return name in self._evacuated

    def has_joined(self, name: str) -> bool:
        return self._supervisor.has_joined(name)

    def join(self, kind: SizedKind, names: Sequence[str], begun: Sequence[SizedKind]) -> dict[str, Change]:
        if kind == "router":
            return {name: self._change(join_router(self, self._supervisor, name, self._router_kind)) for name in names}
        roles = [role_of(name_of(other, 0)) for other in begun if other != "router"]
        self._node_timeout_s = self._find_node_timeout_s()
        may_grow = self._node_timeout_s > 0
        has = has_room(self._basis.config, self._ray, [*roles, *map(role_of, names)], [], may_grow=may_grow)
        if not has and not may_grow:
            raise ValueError("other workers have not left yet")
        plans = self._plans({kind: names}, len(roles))
        return {name: self._joining(name, worker) for name, worker in plans.items()}

    def leave(self, name: str, on_drained: Callable[[], None]) -> Change:
        job = ChangeJob()
        if name in self._processes.routers:
            return Change(job, leave_router(job, self, self._supervisor, name))
        return Change(job, leave_steps(job, self, self._supervisor, [name], on_drained))

    def end(self, name: str) -> Change:
        if name in self._processes.routers:
            return self._change(end_router(self, self._supervisor, name))
        return self._change(end_steps(self, self._supervisor, [name]))

    def keep(self, name: str) -> None:
        self._supervisor.keep(name)
        self.let_stay([name])
        self.tell_routers()

    # --- `tandem scale` ---

    def plan_scaling(self, job: ScaleJob) -> Change:
        """Plans a change as if workers that await their room had been withdrawn.

        Raises ValueError or ClusterError: the change is impossible.
        """
        reserved, self._reserved = self._reserved, {}
        try:
            return self._plan_scaling(job)
        finally:
            self._reserved = reserved

    def _plan_scaling(self, job: ScaleJob) -> Change:
        counts = {kind: len(self.names(kind)) for kind in WORKER_KINDS}
        running = Counter(counts)
        bounds = dict(self.bounds)
        for kind, wanted in job.counts.items():
            if isinstance(wanted, Bounds):
                bounds[kind] = wanted
            else:
                bounds.pop(kind, None)
            if kind == "router":
                self._check_routers(wanted)
            else:
                counts[kind] = wanted.clamp(counts[kind]) if isinstance(wanted, Bounds) else wanted
        most = {kind: bounds[kind].high if kind in bounds else count for kind, count in counts.items()}
        check_kinds(running, most)
        # Checks the counts and bounds together. Lost workers may lack room, so fewer than the lower bound may run.
        self._config({kind: bounds[kind].clamp(n) if kind in bounds else n for kind, n in counts.items()}, bounds)
        wanted_names = {kind: self._kept_or_new(kind, count) for kind, count in counts.items()}
        kept = {name for names in wanted_names.values() for name in names}
        leaving = [name for name in self._processes.worker_plans if name not in kept]
        new = {
            kind: [n for n in names if n not in self._processes.worker_plans] for kind, names in wanted_names.items()
        }
        joining = self._plans(new, -len(leaving))
        nodes = self._basis.nodes
        self._node_timeout_s = self._find_node_timeout_s()
        join_first = has_room(
            self._basis.config,
            self._ray,
            [worker.worker.role for worker in joining.values()],
            [Leaving(role_of(name), nodes.node_of(name) if nodes is not None else "") for name in leaving],
            may_grow=self._node_timeout_s > 0,
        )

        routers = job.counts.get("router", len(self._processes.routers))
        if isinstance(routers, Bounds):
            routers = routers.clamp(len(self._processes.routers))

        def set_bounds() -> None:
            self._bounds.clear()
            self._bounds.update(bounds)
            self._processes.set_may_be_empty(may_be_empty=has_zero(bounds))
            self._save()

        return Scaling(
            job,
            self,
            self._supervisor,
            self._worker_kind,
            joining,
            leaving,
            join_first=join_first,
            last_steps=self._router_steps(job, routers),
            on_done=set_bounds,
        )

    def _router_steps(self, job: ScaleJob, count: int) -> Iterator[None]:
        names = self._processes.routers
        free = [name for name in self._processes.router_configs if name not in names]
        for name in free[: max(0, count - len(names))]:
            yield from join_router(self, self._supervisor, name, self._router_kind)
            job.lines.put(f"{name}: ready")
        for name in sorted(names, key=number_of)[count:]:
            yield from leave_router(job, self, self._supervisor, name)
            job.lines.put(f"{name}: has left")

    def _check_routers(self, wanted: int | Bounds) -> None:
        low, high = (wanted.low, wanted.high) if isinstance(wanted, Bounds) else (wanted, wanted)
        most = len(self._processes.router_configs)
        if not 1 <= low <= high <= most:
            raise ValueError(
                f"num_routers is {wanted}, but this cluster was started for {most}, and clients need one: use 1 to "
                f"{most}, or start it with more"
            )

    def _kept_or_new(self, kind: WorkerKind, count: int) -> list[str]:
        """Returns names for `count` workers: the lowest numbers of those that run, then free ones."""
        running = sorted(self.names(kind), key=number_of)
        names = running[:count]
        number = 0
        while len(names) < count:
            if (name := name_of(kind, number)) not in running:
                names.append(name)
            number += 1
        return names

    def _config(
        self, counts: Mapping[WorkerKind, int], bounds: Mapping[SizedKind, Bounds] | None = None
    ) -> ClusterConfig:
        """Returns the configuration with these numbers of workers."""
        return replace(
            self._basis.config,
            bounds=dict(self._basis.config.bounds) if bounds is None else dict(bounds),
            num_routers=len(self._processes.routers),
            **in_fields(counts),
        )

    def _plans(self, joining: Mapping[WorkerKind, Sequence[str]], num_others: int) -> dict[str, WorkerPlan]:
        """Returns the plans of new workers. Raises ValueError: they do not fit this host's memory.

        Args:
            num_others: further workers that begin to start at this moment, less those that leave.
        """
        counts = {kind: len(self.names(kind)) for kind in WORKER_KINDS}
        # Plans are made for the lowest numbers.
        counts |= {kind: max(map(number_of, names)) + 1 for kind, names in joining.items() if names}
        planned = self._config(counts, {})
        names = {name for new in joining.values() for name in new}
        # Workers that still start have not taken their memory.
        num_starting = sum(not self.has_joined(name) for name in self._processes.worker_plans)
        num_new = max(0, len(names) + num_others + num_starting)
        _, plans = plan(
            planned,
            self._basis.model_dir,
            self._basis.cluster_token,
            self._basis.ports,
            planned.num_workers - num_new,
            self._basis.nodes,
            self._processes.stores.untouched_bytes,
            num_ranks=max(planned.num_ranks, self._basis.config.largest.num_ranks) if self.bounds else 0,
        )
        return {worker.worker.worker_id: worker for worker in plans if worker.worker.worker_id in names}

    def _joining(self, name: str, worker: WorkerPlan) -> Change:
        return Joining(self, self._supervisor, self._worker_kind, {name: worker})

    # --- nodes announced to go (evacuating.py) ---

    def evacuate(self, ends: Mapping[str, float]) -> list[Change]:
        """Returns the changes that empty nodes. Args: ends: end of each process's node, as of time.monotonic."""
        self._evacuated &= ends.keys()
        changes: list[Change] = []
        by_end: defaultdict[float, list[str]] = defaultdict(list)
        serving = [name for name in self._processes.routers if self.has_joined(name)]
        for name, end in ends.items():
            # One that leaves anyway is looked at again.
            if name in self._evacuated or self._supervisor.is_retired(name):
                continue
            if self.is_planned(name):
                by_end[end].append(name)
            elif name in serving and may_leave(name, serving, ends):
                self._evacuated.add(name)
                changes.append(RouterLeaving(name, self, self._supervisor, end))
        for end, leaving in by_end.items():
            self._evacuated.update(leaving)
            changes.append(self._evacuating(leaving, end))
        return changes

    def _evacuating(self, leaving: Sequence[str], end: float) -> Change:
        counts = Counter(kind_of(name) for name in leaving)
        new = {kind: self._kept_or_new(kind, len(self.names(kind)) + count)[-count:] for kind, count in counts.items()}
        try:
            joining = self._plans(new, 0)
        except (ValueError, ClusterError) as error:
            logger.error("%s: no other worker can start now: %s", ", ".join(leaving), error)
            joining = {}
            self._keep_numbers(counts)
        # Others must not take the names.
        self.reserve(list(joining))
        return Evacuating(self, self._supervisor, self._worker_kind, joining, leaving, end)

    def _keep_numbers(self, leaving: Mapping[WorkerKind, int]) -> None:
        """Has Sizing start the missing workers of kinds with a fixed number, once there is room.

        Args:
            leaving: workers that leave without others in their place, by kind, evacuated already.
        """
        for kind, count in leaving.items():
            number = count + sum(not self.is_evacuated(name) for name in self.names(kind))
            self._bounds.setdefault(kind, Bounds(number, number))
        self._save()

    def _find_node_timeout_s(self) -> float:
        config = self._basis.config
        if not config.spans_nodes or config.ray_autoscaler == OFF:
            return 0.0
        return config.node_timeout_s if config.ray_autoscaler == ON or has_autoscaler() else 0.0

    @staticmethod
    def _change(steps: Iterator[None]) -> Change:
        return Change(ChangeJob(), steps)
