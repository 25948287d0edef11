"""A command's view of a cluster whose supervisor is a Ray actor, from any process on that Ray."""

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.deploy.config.bounds import SizedKind
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.joined.supervisor_actor import ENDED, SupervisorActor, SupervisorOrder, SupervisorState
from tandem.deploy.on_ray.codec import encode
from tandem.deploy.on_ray.hosted_ray import SUPERVISOR, HostedRay, namespace_of
from tandem.deploy.on_ray.ray_module import NodeAffinitySchedulingStrategy, RayActorError, RayError, RayTaskError, ray
from tandem.deploy.on_ray.sealed_actor import sealed_order

POLL_INTERVAL_S = 0.2
CALL_TIMEOUT_S = 10.0
# Longer than a supervisor's restart.
SILENCE_LIMIT_S = 60.0
_CONCURRENT_CALLS = 8
_ENVIRONMENT = (
    "TANDEM_CACHE",
    "TANDEM_KERNEL_CACHE",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
)


_PATHS = (
    *("tls_cert", "tls_key", "tls_client_ca", "internal_tls_cert", "internal_tls_key", "internal_tls_ca"),
    *("chat_template", "log_dir"),
)


class RemoteError(Exception):
    """A cluster does not answer; the message is for users."""


class NameOnRayTakenError(Exception):
    """The Ray has another cluster of that name."""


class RemoteCluster:
    def __init__(self, name: str, address: str, actor: Any, order: SupervisorOrder | None = None) -> None:
        """Args: order: sent to each life of the supervisor; None: another command sends it."""
        self._order = order
        self._name = name
        self._address = address
        self._actor = actor
        self._life = ""
        self._next_line = 0

    @staticmethod
    def create(config: ClusterConfig) -> "RemoteCluster":
        """Creates a supervisor, if possible on this host.

        Raises:
            NameOnRayTakenError: the name is taken.
            ValueError: the configuration cannot be sent.
        """
        name = config.cluster_name
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
        order = SupervisorOrder(_portable(config), environment)
        # Fail before there is an actor.
        encode(order)
        options = {
            "name": SUPERVISOR,
            "namespace": namespace_of(name),
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": _CONCURRENT_CALLS,
            "num_cpus": 0,
            "scheduling_strategy": here,
        }
        try:
            actor = ray.remote(SupervisorActor).options(**options).remote(config.ray_address, name, config.spans_nodes)
        except ValueError as error:
            raise NameOnRayTakenError(name) from error
        return RemoteCluster(name, config.ray_address, actor, order)

    @staticmethod
    def find(name: str, address: str) -> "RemoteCluster | None":
        try:
            return RemoteCluster(name, address, ray.get_actor(SUPERVISOR, namespace_of(name)))
        except ValueError:
            return None

    def look(self) -> SupervisorState | None:
        """Returns the state with the lines since the last look; None: the supervisor does not answer now.

        Raises:
            GoneError: the cluster and its supervisor have ended.
            RayEndedError: Ray has ended.
        """
        state = self._call(functools.partial(self._actor.state.remote, self._next_line))
        if state is not None and state.life != self._life:
            if not self._tell():
                return None
            self._life, self._next_line = state.life, 0
            state = self._call(self._actor.state.remote) or state
        if state is not None:
            self._next_line = state.next_line
        return state

    def log_directory(self) -> str:
        """Returns "" for Ray's own directory.

        Raises:
            GoneError: the cluster has ended.
            RemoteError: the supervisor does not answer now.
        """
        directory: str | None = self._call(self._actor.log_directory.remote)
        if directory is None:
            raise RemoteError(f"the supervisor of {self._name} does not answer")
        return directory

    def stop(self, show: Callable[[str], None], *, limit_s: float) -> str:
        """Drains and ends the cluster; returns its error, or "".

        Args:
            limit_s: its processes are killed after this time, or after SILENCE_LIMIT_S without an answer.
        """
        began = heard_at = time.monotonic()
        error = ""
        who = uuid.uuid4().hex
        with contextlib.suppress(GoneError):
            while True:
                # A restarted supervisor does not know of the stop.
                self._call(functools.partial(self._actor.stop.remote, who))
                state = self.look()
                now = time.monotonic()
                if state is not None:
                    heard_at, error = now, state.error
                    for line in state.lines:
                        show(line)
                    if state.phase == ENDED:
                        break
                if now - heard_at > SILENCE_LIMIT_S or now - began > limit_s:
                    show(f"The supervisor of {self._name} does not come to an end: it is killed")
                    break
                time.sleep(POLL_INTERVAL_S)
        self.end()
        return error

    def end(self) -> None:
        ray.kill(self._actor)
        if self._is_replaced():
            return
        hosted = HostedRay(self._address, self._name)
        hosted.end_all()
        hosted.forget()

    def scale(self, counts: Mapping[SizedKind, str]) -> Iterator[Mapping[str, Any]]:
        """Yields the lines of the answer. Raises RemoteError: the cluster does not serve, or its supervisor dies."""
        return self._change(lambda: self._actor.scale.remote(dict(counts)))

    def restart(self, process: str) -> Iterator[Mapping[str, Any]]:
        """As `scale`."""
        return self._change(lambda: self._actor.restart.remote(process))

    def _change(self, ask: Callable[[], Any]) -> Iterator[Mapping[str, Any]]:
        try:
            number = ray.get(ask(), timeout=CALL_TIMEOUT_S)
            is_over = False
            while not is_over:
                lines, is_over, error, is_usage = ray.get(
                    self._actor.scale_lines.remote(number, 1.0), timeout=CALL_TIMEOUT_S
                )
                yield from ({"line": line} for line in lines)
            yield {"error": error, "is_usage": is_usage}
        except RayTaskError as error:
            raise RemoteError(str(error.cause)) from error
        except (RayActorError, TimeoutError) as error:
            raise RemoteError(f"the supervisor of {self._name} does not answer; the change may go on") from error

    def _tell(self) -> bool:
        """Returns False if a new life of the supervisor does not take its order."""
        if self._order is None:
            return True
        public_key = self._call(self._actor.public_key.remote)
        if public_key is not None:
            self._actor.tell.remote(sealed_order(self._order, public_key))
        return public_key is not None

    def _call(self, call: Callable[[], Any]) -> Any:
        """Returns the supervisor's answer; None: there is none now. Raises GoneError: it has ended for good."""
        self._check_up()
        try:
            return ray.get(call(), timeout=CALL_TIMEOUT_S)
        except TimeoutError:
            return None
        except RayActorError:
            # With Ray's head gone, the lookup would take a minute.
            self._check_up()
            if RemoteCluster.find(self._name, self._address) is None or self._is_replaced():
                raise GoneError(self._name) from None
            time.sleep(POLL_INTERVAL_S)
            return None
        except RayError:
            return None

    def _is_replaced(self) -> bool:
        found = RemoteCluster.find(self._name, self._address)
        return found is not None and found._actor._actor_id != self._actor._actor_id

    def _check_up(self) -> None:
        if not HostedRay(self._address, self._name).is_up():
            raise RayEndedError


class RayEndedError(Exception):
    """Ray has ended, and the cluster with it."""


class GoneError(Exception):
    """The cluster has ended."""


def _portable(config: ClusterConfig) -> ClusterConfig:
    """Makes paths absolute."""
    whole: dict[str, Any] = {name: str(Path(path).absolute()) for name in _PATHS if (path := getattr(config, name))}
    if Path(config.model).exists():
        whole["model"] = str(Path(config.model).absolute())
    return replace(config, **whole)
