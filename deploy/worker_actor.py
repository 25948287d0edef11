"""A worker of any role as a Ray actor."""

import threading
from collections.abc import Sequence

from both_worker.worker import BothRole
from decode_worker.worker import DecodeRole
from deploy.cluster_config import WorkerPlan
from deploy.garbage import collect_seldom, freeze_objects
from prefill_worker.worker import PrefillRole
from tandem import logs
from worker.base import WorkerRole
from worker.process import WorkerProcess


def _role(plan: WorkerPlan) -> WorkerRole:
    match plan.worker.role:
        case "prefill":
            return PrefillRole(plan.prefill, plan.links)
        case "decode":
            return DecodeRole(plan.decode, plan.links)
        case "both":
            return BothRole(plan.prefill, plan.decode)


class WorkerActor:
    """Starts, stops and watches the process; no request ever crosses a Ray call."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._config = plan.worker
        self._progress = "starting"
        self._process = WorkerProcess(plan.worker, _role(plan), self._set_progress)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Loads the model; raises ValueError if it cannot be served, or the log not be written."""
        logs.configure(self._config.worker_id, self._config.log)
        self._process.start()
        freeze_objects()
        collect_seldom()

    def connect(self, router_addresses: Sequence[str]) -> None:
        """Joins the cluster; raises TimeoutError if none of the routers answers."""
        self._process.connect(router_addresses)

    def progress(self) -> str:
        return self._progress

    def mapped_workers(self) -> list[str]:
        """The workers, dead ones too, whose memory this one maps."""
        return self._process.mapped_workers()

    def wait_stopped(self) -> None:
        """Returns after stop; the caller sees an error at once if the process dies."""
        self._stopped.wait()

    def stop(self) -> None:
        self._process.stop()
        self._stopped.set()

    def _set_progress(self, progress: str) -> None:
        self._progress = progress
