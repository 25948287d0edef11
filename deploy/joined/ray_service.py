"""A cluster as an application of Ray Serve: this is how KubeRay's RayService starts, watches, stops and replaces one.

Serve passes no request on: clients call the routers' own ports, on the host where this application's one replica is.
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
# A drain may take as long as its cluster lets it; Serve ends the replica after `graceful_shutdown_timeout_s`.
_STOP_LIMIT_S = 24 * 3600.0
_NUM_ERROR_LINES = 20


def application(arguments: Mapping[str, str]) -> Any:
    """What `import_path` names; returns a ray.serve.Application.

    Args:
        arguments: config: path of a file with the options of `tandem serve`, on the replica's host; name: that of the
            cluster, DEFAULT_NAME if it is left out.

    Raises:
        ValueError: there are others, or no config.
    """
    if unknown := set(arguments) - _ARGUMENTS:
        raise ValueError(
            f"args have {', '.join(sorted(unknown))}; there are config and name, and options stand in config"
        )
    if not arguments.get("config"):
        raise ValueError("args need config, the path of a file with the options of `tandem serve`")
    # Who imports this has Ray Serve call it, which few installations have all of.
    from ray import serve

    deployment: Any = serve.deployment(ServedCluster, name="ServedCluster", num_replicas=1)
    return deployment.bind(arguments["config"], arguments.get("name", DEFAULT_NAME))


class ServedCluster:
    """Its one replica: there as long as the cluster is, and the other way round."""

    def __init__(self, config: str, name: str) -> None:
        """Returns once the cluster serves, so that Serve has the application wait until then.

        Raises:
            RuntimeError: it does not start, and why.
        """
        self._name = name
        self._address = ray.get_runtime_context().gcs_address
        self._heard_at = time.monotonic()
        # An earlier replica may have died without its cluster, or be stopping it.
        cluster = self._found()
        if cluster is None:
            self._start(config)
            cluster = self._found()
        if cluster is None:
            raise RuntimeError(f"the cluster {name} has ended as soon as it had started")
        self._cluster: RemoteCluster | None = cluster

    def check_health(self) -> None:
        """Serve calls this every some seconds, and replaces a replica that raises.

        One that was asked to stop is let drain: another replica would have to wait for that anyway.

        Raises:
            RuntimeError: the cluster has ended, or its supervisor has not answered for a minute.
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
        """Serve calls this when the replica is to end: the cluster drains, and ends."""
        cluster = getattr(self, "_cluster", None)
        self._cluster = None
        if cluster is not None:
            # Where all of Ray ends there is nothing left to stop.
            with contextlib.suppress(GoneError, RayEndedError):
                # Whoever asks one that is asked already has it cut its requests short.
                while (state := cluster.look()) is not None and state.phase in (STOPPING, ENDED):
                    time.sleep(_POLL_S)
                cluster.stop(print, limit_s=_STOP_LIMIT_S)

    def _found(self) -> RemoteCluster | None:
        """The cluster once it serves; None: there is none, or no longer."""
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
        # Its routers are where clients look for them: at the address of this node.
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
