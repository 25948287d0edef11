"""Builds the worker of a plan. Imports all of a worker's modules; torch takes seconds."""

from collections.abc import Callable

from tandem.both_worker.worker import BothRole
from tandem.decode_worker.worker import DecodeRole
from tandem.deploy.config.cluster_config import WorkerPlan
from tandem.pagestore.client.node_store import NodeStore
from tandem.prefill_worker.worker import PrefillRole
from tandem.worker.base import StoreConnection, WorkerRole
from tandem.worker.config import WorkerConfig
from tandem.worker.process import WorkerProcess


def worker_process(plan: WorkerPlan, on_progress: Callable[[str], None]) -> WorkerProcess:
    return WorkerProcess(plan.worker, _role(plan), on_progress, _store(plan.worker))


def _store(worker: WorkerConfig) -> StoreConnection | None:
    return NodeStore(worker.store, worker.cluster_token) if worker.store is not None else None


def _role(plan: WorkerPlan) -> WorkerRole:
    match plan.worker.role:
        case "prefill":
            return PrefillRole(plan.prefill, plan.links)
        case "decode":
            return DecodeRole(plan.decode, plan.links)
        case "both":
            links = plan.links if plan.has_links else None
            return BothRole(plan.prefill, plan.decode, links, itl_objective_s=plan.itl_objective_s)
