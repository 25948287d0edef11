"""A cluster as a Ray Serve application, for KubeRay's RayService.

Serve forwards no requests: clients call the routers' ports on the host of the application's only replica.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from tandem.deploy.config.cluster_options import DEFAULT_NAME
from tandem.deploy.joined.remote_cluster import SILENCE_LIMIT_S, GoneError, RayEndedError, RemoteCluster
from tandem.deploy.joined.supervisor_actor import ENDED, SERVING, STARTING, STOPPING
from tandem.deploy.on_ray.hosted_ray import find_clusters
from tandem.deploy.on_ray.ray_module import ray

_ARGUMENTS = {"config", "name"}
_POLL_S = 0.5
# The cluster limits its drain, and Serve kills the replica after `graceful_shutdown_timeout_s`.
_STOP_LIMIT_S = 24 * 3600.0
_NUM_ERROR_LINES = 20


def application(arguments: Mapping[str, str]) -> Any:
    """The target of `import_path`; returns a ray.serve.Application.

    Args:
        arguments: `config`: path of a `tandem serve` configuration on the replica's host; `name`: default DEFAULT_NAME.

    Raises:
        ValueError: an argument is unknown, or `config` is missing.
    """
    if unknown := set(arguments) - _ARGUMENTS:
        raise ValueError(
            f"args have {', '.join(sorted(unknown))}; there are config and name, and options stand in config"
        )
    if not arguments.get("config"):
        raise ValueError("args need config, the path of a file with the options of `tandem serve`")
    from ray import serve

    deployment: Any = serve.deployment(ServedCluster, name="ServedCluster", num_replicas=1)
    return deployment.bind(arguments["config"], arguments.get("name", DEFAULT_NAME))


class ServedCluster:
    def __init__(self, config: str, name: str) -> None:
        """Raises RuntimeError: the cluster does not start."""
        self._name = name
        self._address = ray.get_runtime_context().gcs_address
        self._heard_at = time.monotonic()
        # A dead replica's cluster may still run.
        cluster = self._found()
        if cluster is None:
            self._start(config)
            cluster = self._found()
        if cluster is None:
            raise RuntimeError(f"the cluster {name} has ended as soon as it had started")
        self._cluster: RemoteCluster | None = cluster

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica on an error. A draining cluster is healthy.

        Raises:
            RuntimeError: the cluster has ended, or its supervisor is silent for SILENCE_LIMIT_S.
        """
        assert self._cluster is not None
        try:
            state = self._cluster.look()
        except (GoneError, RayEndedError):
            raise RuntimeError(f"the cluster {self._name} has ended") from None
        if state is not None:
            self._heard_at = time.monotonic()
            if state.phase == ENDED:
                raise RuntimeError(f"the cluster {self._name} has ended: {state.error or 'it was asked to stop'}")
        elif time.monotonic() - self._heard_at > SILENCE_LIMIT_S:
            raise RuntimeError(f"the supervisor of the cluster {self._name} does not answer")

    def __del__(self) -> None:
        """Called by Serve to end the replica."""
        cluster = getattr(self, "_cluster", None)
        self._cluster = None
        if cluster is not None:
            # If Ray ends, so does the cluster.
            with contextlib.suppress(GoneError, RayEndedError):
                # A second stop request would cut the drain short.
                while (state := cluster.look()) is not None and state.phase in (STOPPING, ENDED):
                    time.sleep(_POLL_S)
                cluster.stop(print, limit_s=_STOP_LIMIT_S)

    def _found(self) -> RemoteCluster | None:
        """Waits for a cluster of this name to serve; None: none exists, or it ends."""
        while self._name in find_clusters() and (cluster := RemoteCluster.find(self._name, self._address)) is not None:
            try:
                state = cluster.look()
            except GoneError:
                return None
            if state is not None:
                self._heard_at = time.monotonic()
                if state.phase == SERVING:
                    return cluster
            if time.monotonic() - self._heard_at > SILENCE_LIMIT_S and (state is None or state.phase != STARTING):
                raise RuntimeError(f"a cluster {self._name} is there and does not answer")
            time.sleep(_POLL_S)
        return None

    def _start(self, config: str) -> None:
        here = ray.util.get_node_ip_address()
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "tandem.deploy.cli.main",
                    "serve",
                    "--detach",
                    "--config",
                    config,
                    "--name",
                    self._name,
                ),
                *("--ray-address", self._address, "--host", here),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout, flush=True)
        if done.returncode:
            raise RuntimeError("\n".join(done.stdout.splitlines()[-_NUM_ERROR_LINES:]))
