"""A worker of any role as a Ray actor. The launcher imports this too, without what a worker needs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem import hosts, logs
from tandem.deploy.actors.stop_wait import StopWait
from tandem.deploy.config.cluster_config import WorkerPlan
from tandem.deploy.host.garbage import collect_seldom, freeze_objects, no_collections
from tandem.deploy.host.gpu_opening import GpuOpening
from tandem.deploy.on_ray.sealed_actor import SealedActor

if TYPE_CHECKING:
    from tandem.worker.process import WorkerProcess

# Of Ray's labels of a node the first that it has says which hosts are near each other.
RACK_LABELS = ("rack", "ray.io/availability-zone")


class WorkerActor(SealedActor[WorkerPlan]):
    """Starts, stops and watches the process; no request ever crosses a Ray call."""

    def __init__(self, plan: WorkerPlan | None) -> None:
        super().__init__(plan)
        self._progress = "starting"
        # It is there once a worker's imports are over.
        self._process: WorkerProcess | None = None
        self._stopped = StopWait()

    def start(self) -> None:
        """Loads the model; raises ValueError if it cannot be served, or the log not be written."""
        plan = _at_home(self._wait_order())
        worker = plan.worker
        logs.configure(worker.worker_id, worker.log)
        self._set_progress("importing")
        opening = GpuOpening() if worker.engine.device == "cuda" else None
        with no_collections():
            from tandem.deploy.actors.worker_roles import worker_process
        if opening is not None:
            opening.wait()
        process = self._process = worker_process(plan, self._set_progress)
        process.start()
        freeze_objects()
        collect_seldom()

    def connect(self, router_addresses: Sequence[str]) -> None:
        """Joins the cluster, once started; raises TimeoutError if none of the routers answers."""
        assert self._process is not None
        self._process.connect(router_addresses)

    def progress(self) -> str:
        return self._progress

    def mapped_workers(self) -> list[str]:
        """The workers, dead ones too, whose memory this one maps."""
        return self._process.mapped_workers() if self._process is not None else []

    def wait_stopped(self) -> None:
        """Returns after stop, or when it is called again; the caller sees an error at once if the process dies."""
        self._stopped.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
        self._stopped.set()

    def _set_progress(self, progress: str) -> None:
        self._progress = progress


def _at_home(plan: WorkerPlan) -> WorkerPlan:
    """The plan with the address and the rack of the node that this process is on.

    Raises:
        ValueError: it has no address that fits.
    """
    if not plan.spans_nodes:
        return plan
    from tandem.deploy.on_ray.ray_module import ray, ray_worker

    assert ray_worker._global_node is not None
    node = ray_worker._global_node.node_ip_address
    host = hosts.choose_address(hosts.own_addresses(), plan.interface, node)
    labels = ray.get_runtime_context().get_node_labels()
    rack = next((labels[name] for name in RACK_LABELS if labels.get(name)), "")
    return replace(plan, worker=replace(plan.worker, host=host, rack=rack))
