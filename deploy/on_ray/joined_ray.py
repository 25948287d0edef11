"""An existing Ray (`ray start`), on one or more hosts. Each cluster has its own namespace."""

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

import tandem
from tandem.deploy.on_ray.autoscaler import leaving_nodes
from tandem.deploy.on_ray.local_ray import rephrase_errors
from tandem.deploy.on_ray.ray_base import RayBase
from tandem.deploy.on_ray.ray_module import (
    NodeAffinitySchedulingStrategy,
    ray,
    ray_constants,
    ray_worker,
    settings_reset,
    state,
    utils,
)
from tandem.deploy.on_ray.ray_probe import call_ray
from tandem.deploy.on_ray.ray_signals import own_signals

logger = logging.getLogger(__name__)

_SET = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class JoinedRay(RayBase):
    def __init__(
        self, address: str, namespace: str | None = None, *, spans_nodes: bool = False, ship_code: bool = False
    ) -> None:
        """
        Args:
            address: "host:port", as shown by `ray start`.
            namespace: of actor names; None: a new one.
            spans_nodes: use all nodes, not only this host.
            ship_code: have Ray copy this installation's code to the nodes.
        """
        self._address = address
        self._namespace = namespace
        self._spans_nodes = spans_nodes
        self._ship_code = ship_code
        self._found = {name: os.environ.get(name) for name in _SET}

    @property
    def log_directory(self) -> str:
        joined = ray_worker._global_node
        return joined.get_logs_dir_path() if joined is not None else f"the logs of the Ray at {self._address}"

    def start(self, num_processes: int) -> None:
        """Raises ValueError: no Ray answers, or it refuses the token, has another version, or has too few CPUs left."""
        token = self._token_that_opens()
        for name in _SET:
            os.environ.pop(name, None)
        os.environ["RAY_AUTH_MODE"] = "token" if token else "disabled"
        if token:
            os.environ["RAY_AUTH_TOKEN"] = token
        settings_reset()()
        rephrase_errors()
        try:
            with own_signals(utils, ray_constants):
                ray.init(
                    address=self._address,
                    namespace=self._namespace,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={"py_modules": [str(Path(tandem.__file__).parent)]} if self._ship_code else None,
                )
        except (RuntimeError, ConnectionError, ValueError) as error:
            raise ValueError(f"cannot join the Ray at {self._address}: {' '.join(str(error).split())}") from error
        self.check_room(num_processes)

    def check_room(self, num_processes: int) -> None:
        num_cpus = self.num_free("CPU")
        if num_cpus < num_processes:
            where = "" if self._spans_nodes else " on this host"
            raise ValueError(
                f"the Ray at {self._address} has {num_cpus} CPUs left{where}, and the cluster takes one for each "
                f"of its {num_processes} processes; use fewer workers or routers, or a Ray with more (--num-cpus)"
            )

    def stop(self) -> None:
        ray.shutdown()
        for name, value in self._found.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def free(self) -> dict[str, Mapping[str, float]]:
        leaving = leaving_nodes()
        nodes: dict[str, Mapping[str, float]] = {
            node_id: amounts
            for node_id, amounts in state.available_resources_per_node().items()
            if node_id not in leaving
        }
        here = ray.get_runtime_context().get_node_id()
        return nodes if self._spans_nodes else {here: nodes.get(here, {})}

    def num_nodes(self) -> int:
        return sum(node["Alive"] for node in ray.nodes())

    def actor_options(self) -> dict[str, Any]:
        # Other jobs must see the CPUs as taken. All processes run on this host, unless NodePlacement places them.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return {"num_cpus": 1, "scheduling_strategy": here}

    def _token_that_opens(self) -> str:
        """Returns "" if the Ray needs no token."""
        with contextlib.suppress(_ClosedError):
            self._check_version(self._call(""))
            logger.warning(
                "the Ray at %s answers calls without a token: any client that reaches it can run code as its user",
                self._address,
            )
            return ""
        token = self._given_token()
        if not (token.isascii() and token.isprintable()):
            raise ValueError("RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH's file, has characters that no token has")
        if not token:
            raise ValueError(
                f"the Ray at {self._address} asks for a token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file"
            )
        try:
            self._check_version(self._call(token))
        except _ClosedError as error:
            raise ValueError(
                f"the Ray at {self._address} does not take this token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
                "~/.ray/auth_token must have the one that it was started with"
            ) from error
        return token

    def _given_token(self) -> str:
        if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
            return token
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
        with contextlib.suppress(OSError):
            return path.read_text().strip()
        return ""

    def _call(self, token: str) -> bytes:
        try:
            return call_ray(self._address, token)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise _ClosedError from error
            raise ValueError(
                f"no Ray answers at {self._address} ({error.code().name}); `ray start --head` shows the address of the "
                "one that it starts"
            ) from error

    def _check_version(self, answer: bytes) -> None:
        # ray.init would find out later.
        if ray.__version__.encode() not in answer:
            raise ValueError(
                f"the Ray at {self._address} is of another version than the one here, {ray.__version__}; both must be "
                "the same"
            )


class _ClosedError(Exception):
    """The Ray refuses the token."""
