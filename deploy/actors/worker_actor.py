"""A worker of any role as a Ray actor. The launcher imports this too, so the worker's own imports come in `start`."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem import hosts, logs
from tandem.deploy.actors.process_actor import ProcessActor
from tandem.deploy.config.cluster_config import WorkerPlan
from tandem.deploy.host.gpu_opening import GpuOpening
from tandem.deploy.host.gpu_turn import GpuTurn
from tandem.deploy.host.run_record import default_directory
from tandem.deploy.on_ray.own_node import own_address, own_rack
from tandem.garbage import collect_seldom, freeze_objects, no_collections

if TYPE_CHECKING:
    from tandem.worker.process import WorkerProcess

logger = logging.getLogger(__name__)


class WorkerActor(ProcessActor[WorkerPlan]):
    """Runs a worker process."""

    order_type = WorkerPlan
    _process: "WorkerProcess | None"

    def __init__(self, plan: WorkerPlan | None) -> None:
        super().__init__(plan)
        self._progress = "starting"

    def start(self) -> None:
        """Loads the model.

        Raises:
            ValueError: the model cannot be served, or the log file cannot be written.
            OSError: the worker's turn on a shared GPU did not come.
        """
        plan = _with_node_address(self._wait_order())
        worker = plan.worker
        logs.configure(worker.worker_id, worker.log)
        if plan.stores and worker.store is None:
            logger.warning("the node %s has no page store, serving without one", own_address())
        self._set_progress("importing")
        turn = GpuTurn(default_directory(), lambda: self._set_progress("waiting for other workers on its GPU"))
        with turn:
            is_shared = worker.engine.workers_per_gpu > 1
            opening = GpuOpening(turn=turn if is_shared else None) if worker.engine.device == "cuda" else None
            with no_collections():
                from tandem.deploy.actors.worker_roles import worker_process
            if opening is not None:
                opening.wait()
            process = self._process = worker_process(plan, self._set_progress)
            process.start()
        freeze_objects()
        collect_seldom()

    def connect(self, router_addresses: Sequence[str]) -> None:
        """Joins the cluster. Raises TimeoutError: no router answers."""
        assert self._process is not None
        self._process.connect(router_addresses)

    def set_routers(self, router_addresses: Sequence[str]) -> None:
        """Replaces the routers; nothing before `connect`."""
        if self._process is not None:
            self._process.set_routers(router_addresses)

    def progress(self) -> str:
        return self._progress

    def mapped_workers(self) -> list[str]:
        """Returns the workers, also dead ones, whose memory this worker maps."""
        return self._process.mapped_workers() if self._process is not None else []

    def _set_progress(self, progress: str) -> None:
        self._progress = progress


def _with_node_address(plan: WorkerPlan) -> WorkerPlan:
    """Adds this node's address, rack and page store. Raises ValueError: no address of the node fits."""
    if not plan.spans_nodes:
        return plan
    node = own_address()
    host = hosts.choose_address(hosts.own_addresses(), plan.interface, node)
    return replace(plan, worker=replace(plan.worker, host=host, rack=own_rack(), store=plan.stores.get(node)))
