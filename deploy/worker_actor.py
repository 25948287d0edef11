"""A worker of any role as a Ray actor."""

import threading

from both_worker.worker import BothRole
from decode_worker.worker import DecodeRole, make_decode_scheduler
from deploy.garbage import collect_seldom, freeze_objects
from prefill_worker.worker import PrefillRole, make_prefill_scheduler
from tandem import logs
from tandem.config import WorkerConfig
from worker.process import WorkerProcess, WorkerRole


def _role(config: WorkerConfig) -> WorkerRole:
    match config.role:
        case "prefill":
            return PrefillRole()
        case "decode":
            return DecodeRole()
        case "both":
            return BothRole(make_prefill_scheduler, make_decode_scheduler)


class WorkerActor:
    """Starts, stops and watches the process; no request ever crosses a Ray call."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._progress = "starting"
        self._process = WorkerProcess(config, _role(config), self._set_progress)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Loads the model; raises ValueError if it cannot be served, or the log not be written."""
        logs.configure(self._config.worker_id, self._config.log)
        self._process.start()
        freeze_objects()
        collect_seldom()

    def connect(self, router_address: str) -> None:
        self._process.connect(router_address)

    def progress(self) -> str:
        return self._progress

    def wait_stopped(self) -> None:
        """Returns after stop; the caller sees an error at once if the process dies."""
        self._stopped.wait()

    def stop(self) -> None:
        self._process.stop()
        self._stopped.set()

    def _set_progress(self, progress: str) -> None:
        self._progress = progress
