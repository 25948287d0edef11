"""Keeps a cluster's workers alive."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
RESTART_DELAY_S = 1.0
# A process that answers nothing for so long is ended and started again: it may be stopped, which no stream shows.
PROBE_INTERVAL_S = 2.0
SILENCE_LIMIT_S = 60.0

ROUTER = "router"


class RouterDiedError(Exception):
    """Nothing can be served any more."""


class _Awaited(NamedTuple):
    """What a reference that Ray is waited on for means.

    Attributes:
        stage: "end" of a process, "load" or "join" of one that is started again, "answer" to a probe.
    """

    stage: str
    name: str


class Supervisor:
    """Watches the router and the workers; a worker that dies, or does not answer, is started again. Nothing here blocks
    for longer than a poll, so that a stop or another death is always seen."""

    def __init__(
        self,
        router: Any,
        workers: dict[str, Any],
        start_worker: Callable[[str], Any],
        cluster_address: str,
    ) -> None:
        """
        Args:
            workers: actors by name; `start_worker` replaces entries.
            start_worker: makes the actor of a name anew and returns the reference that ends with its loading.
            cluster_address: the router's port for workers.
        """
        self._workers = workers
        self._start_worker = start_worker
        self._cluster_address = cluster_address
        self._awaited: dict[Any, _Awaited] = {router.wait_stopped.remote(): _Awaited("end", ROUTER)}
        self._restart_at: dict[str, float] = {}
        # This is when each running worker last answered.
        self._answered_at: dict[str, float] = {}
        self._next_probe = 0.0
        for name in workers:
            self._watch(name)

    def run(self, stop: threading.Event) -> None:
        """Returns when `stop` is set.

        Raises:
            RouterDiedError: the router's process died.
        """
        while not stop.is_set():
            ended, _ = ray.wait(list(self._awaited), num_returns=1, timeout=POLL_INTERVAL_S, fetch_local=False)
            for ref in ended:
                self._handle(self._awaited.pop(ref), ref)
            now = time.monotonic()
            for name in [name for name, due in self._restart_at.items() if now >= due]:
                del self._restart_at[name]
                self._awaited[self._start_worker(name)] = _Awaited("load", name)
            if now >= self._next_probe:
                self._next_probe = now + PROBE_INTERVAL_S
                self._probe(now)

    def _handle(self, awaited: _Awaited, ref: Any) -> None:
        name = awaited.name
        match awaited.stage:
            case "end":
                if name == ROUTER:
                    raise RouterDiedError("the router process died")
                logger.warning("worker %s died; starting it again", name)
                self._start_later(name)
            case "answer":
                with contextlib.suppress(RayError):
                    ray.get(ref)
                    if name in self._answered_at:
                        self._answered_at[name] = time.monotonic()
            case stage:
                try:
                    ray.get(ref)
                except (RayError, ValueError, TimeoutError) as error:
                    logger.error("worker %s could not be started again: %s", name, error)
                    ray.kill(self._workers[name])
                    self._start_later(name)
                    return
                if stage == "load":
                    self._awaited[self._workers[name].connect.remote([self._cluster_address])] = _Awaited("join", name)
                else:
                    logger.warning("worker %s is back", name)
                    self._watch(name)

    def _watch(self, name: str) -> None:
        self._awaited[self._workers[name].wait_stopped.remote()] = _Awaited("end", name)
        self._answered_at[name] = time.monotonic()

    def _start_later(self, name: str) -> None:
        self._answered_at.pop(name, None)
        self._restart_at[name] = time.monotonic() + RESTART_DELAY_S

    def _probe(self, now: float) -> None:
        due = {awaited.name for awaited in self._awaited.values() if awaited.stage == "answer"}
        for name, answered_at in list(self._answered_at.items()):
            if now - answered_at > SILENCE_LIMIT_S:
                logger.warning("worker %s has not answered for %.0f s", name, SILENCE_LIMIT_S)
                # Its end is noticed like any other.
                self._answered_at[name] = now
                ray.kill(self._workers[name])
            elif name not in due:
                self._awaited[self._workers[name].progress.remote()] = _Awaited("answer", name)
