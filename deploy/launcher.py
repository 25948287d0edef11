"""Starts, watches and stops a cluster on this host: one local Ray, a router, and the workers."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from deploy.supervisor import RouterDiedError, Supervisor
from router.process import RouterAddresses
from tandem.cluster_config import ClusterConfig
from tandem.config import Role, RouterConfig, WorkerConfig
from tandem.engine.kvcache.base import PageLayout, available_memory_bytes
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.resolve import model_fingerprint, resolve_model

logger = logging.getLogger(__name__)

# Progress of one part of the cluster, by the part's name.
OnProgress = Callable[[str, str], None]

START_TIMEOUT_S = 1800.0
ROUTER_START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 6.0
POLL_INTERVAL_S = 0.2
# Ray's own store is for its bookkeeping here: no request data and no KV ever enters it.
OBJECT_STORE_BYTES = 80 * 2**20


class ClusterError(Exception):
    """The cluster cannot start or go on; the message is for the person who started it."""


class Cluster:
    """A running cluster. Used as a context manager; every method is called from one thread.

    Attributes:
        router_ready_s: seconds from the creation of the router's process until its ports were open.
    """

    def __init__(self, config: ClusterConfig, on_progress: OnProgress) -> None:
        self._config = config
        self._on_progress = on_progress
        self._router: Any = None
        self._workers: dict[str, Any] = {}
        self._worker_configs: dict[str, WorkerConfig] = {}
        # Of this life of the cluster: who has it may speak to its processes.
        self.cluster_token = secrets.token_hex(16)
        self.addresses = RouterAddresses("", "")
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
            ClusterError: it cannot be started as configured.
        """
        config = self._config
        try:
            self._on_progress("model", "resolving")
            model_dir = resolve_model(
                config.model, config.load_format, on_progress=lambda what, _: self._on_progress("model", what)
            )
            router_config, worker_configs = _plan(config, model_dir, self.cluster_token)
        except ValueError as error:
            raise ClusterError(str(error)) from error
        self.model_name = router_config.model_name
        self._on_progress("model", "ready")
        self._check_port()
        self._worker_configs = {c.worker_id: c for c in worker_configs}
        self._init_ray()
        # All processes start side by side; the workers need the router's address only once they are loaded.
        from deploy.router_actor import RouterActor

        started = time.monotonic()
        self._on_progress("router", "starting")
        self._router = _actor_class(RouterActor).remote(router_config)
        address_ref = self._router.start.remote()
        loading = {self._create_worker(c): c.worker_id for c in worker_configs}
        self.addresses = RouterAddresses(*self._get(address_ref, ROUTER_START_TIMEOUT_S, "router"))
        self.router_ready_s = time.monotonic() - started
        logger.info("router ready after %.2f s", self.router_ready_s)
        self._on_progress("router", "ready")
        self._wait_for(loading)
        joining = {self._workers[c].connect.remote(self.addresses.cluster): c for c in self._workers}
        self._wait_for(joining)

    def supervise(self, stop: threading.Event) -> None:
        """Keeps the workers alive until `stop` is set: one that dies is started again.

        Raises:
            ClusterError: the router died.
        """
        supervisor = Supervisor(
            self._router,
            self._workers,
            lambda name: self._create_worker(self._worker_configs[name]),
            self.addresses.cluster,
        )
        try:
            supervisor.run(stop)
        except RouterDiedError as error:
            raise ClusterError(str(error)) from error

    def stop(self) -> None:
        """Stops every process this cluster started."""
        if not ray.is_initialized():
            return
        actors = [a for a in (self._router, *self._workers.values()) if a is not None]
        refs = [actor.stop.remote() for actor in actors]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=STOP_TIMEOUT_S)
        self._router, self._workers = None, {}
        ray.shutdown()

    def _check_port(self) -> None:
        """Finds out at once, and not when Ray is up, that somebody else has the clients' port."""
        with socket.socket() as probe:
            # As gRPC binds: a port whose last connections are still winding down is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._config.host, self._config.grpc_port))
            except OSError as error:
                raise ClusterError(
                    f"cannot listen on {self._config.host}:{self._config.grpc_port}: {error.strerror}; choose another "
                    "port with --grpc-port"
                ) from error

    def _init_ray(self) -> None:
        self._on_progress("ray", "starting")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray would run actors at nice 15: whatever else ran on the host would keep every token waiting.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(
            address="local",
            num_cpus=self._config.num_workers + 1,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._on_progress("ray", "ready")

    def _create_worker(self, config: WorkerConfig) -> Any:
        """Starts a worker's process and has it load; returns the reference that ends with the loading."""
        from deploy.worker_actor import WorkerActor

        self._on_progress(config.worker_id, "starting")
        actor = _actor_class(WorkerActor).remote(config)
        self._workers[config.worker_id] = actor
        return actor.start.remote()

    def _wait_for(self, refs: dict[Any, str]) -> None:
        """Waits for start-up steps of several parts, showing the workers' progress."""
        deadline = time.monotonic() + START_TIMEOUT_S
        waiting = dict(refs)
        while waiting:
            if time.monotonic() > deadline:
                raise ClusterError(f"{', '.join(waiting.values())} did not start within {START_TIMEOUT_S:.0f} s")
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_INTERVAL_S, fetch_local=False)
            for ref in done:
                self._get(ref, STOP_TIMEOUT_S, waiting.pop(ref))
            self._show_progress()

    def _show_progress(self) -> None:
        refs = {actor.progress.remote(): worker_id for worker_id, actor in self._workers.items()}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=POLL_INTERVAL_S, fetch_local=False)
        for ref in done:
            self._on_progress(refs[ref], self._get(ref, STOP_TIMEOUT_S, refs[ref]))

    def _get(self, ref: Any, timeout_s: float, name: str) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            raise ClusterError(f"{name}: {_reason(error)}") from error


def _actor_class(cls: type) -> Any:
    """A class as a Ray actor: three concurrent calls, so that it can be asked for progress and to stop while it
    starts; no CPU of Ray's own accounting, and no restart but ours. It has no name: Ray frees a dead actor's name too
    late for its successor."""
    return ray.remote(cls).options(num_cpus=0, max_concurrency=3, max_restarts=0)


def _reason(error: Exception) -> str:
    """What a person needs of an error that crossed a process boundary."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    if isinstance(error, RayActorError):
        return f"its process died while it started; {_log_directory()} says why"
    return str(error) or type(error).__name__


def _log_directory() -> str:
    return os.environ.get("RAY_TMPDIR", "/tmp") + "/ray/session_latest/logs"


def _plan(config: ClusterConfig, model_dir: Path, cluster_token: str) -> tuple[RouterConfig, list[WorkerConfig]]:
    """Turns a cluster's configuration into that of its processes.

    Raises:
        ValueError: it does not fit the model.
    """
    model_config = ModelConfig.from_dir(model_dir)
    pool_tokens = config.num_pages * config.page_size
    max_model_len = config.max_model_len or min(model_config.max_position_embeddings, pool_tokens)
    if max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} is above the model's own limit of {model_config.max_position_embeddings}"
        )
    if max_model_len > pool_tokens:
        raise ValueError(
            f"{config.num_pages} pages of {config.page_size} tokens hold {pool_tokens} tokens, fewer than "
            f"max_model_len {max_model_len}; use more pages or a smaller max_model_len"
        )
    _check_memory(config, model_config)
    # One thread each where workers are as many as cores: two that share cores wait for each other at every barrier.
    num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_workers)
    engine = config.engine(str(model_dir), num_threads)
    fingerprint = model_fingerprint(model_dir, config.load_format)
    router = config.router(str(model_dir), config.model.rstrip("/").rpartition("/")[2], max_model_len, cluster_token)
    workers = [
        config.worker(f"{role}-{i}", role, engine, fingerprint, max_model_len, cluster_token)
        for role, count in _counts(config)
        for i in range(count)
    ]
    return router, workers


def _check_memory(config: ClusterConfig, model_config: ModelConfig) -> None:
    """Refuses pools that together do not fit: each worker alone would see the same free memory."""
    layout = PageLayout(
        model_config.num_layers, config.page_size, model_config.num_kv_heads, model_config.head_dim, config.dtype
    )
    needed = config.num_workers * config.num_pages * layout.page_bytes
    available = available_memory_bytes()
    if needed > available:
        raise ValueError(
            f"{config.num_workers} pools of {config.num_pages} pages of {layout.page_bytes} bytes need "
            f"{needed / 2**20:.0f} MiB, but only {available / 2**20:.0f} MiB of memory are free; use fewer pages"
        )


def _counts(config: ClusterConfig) -> Iterator[tuple[Role, int]]:
    yield "prefill", config.num_prefill
    yield "decode", config.num_decode
    yield "both", config.num_both
