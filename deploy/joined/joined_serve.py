"""`tandem serve` on an existing Ray. The cluster's supervisor is an actor, which the command watches.

Killing the command leaves the cluster running. Ctrl-C and SIGTERM stop it.
"""

import functools
import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

from rich.console import Console

from tandem import exit_codes
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.config.cluster_options import OPTIONS
from tandem.deploy.config.options import in_flags
from tandem.deploy.host.guard import run_guarded
from tandem.deploy.host.ports import ClientAddresses
from tandem.deploy.host.run_record import RunOwner
from tandem.deploy.joined.remote_cluster import (
    POLL_INTERVAL_S,
    GoneError,
    NameOnRayTakenError,
    RayEndedError,
    RemoteCluster,
)
from tandem.deploy.joined.supervisor_actor import ENDED, SERVING, SupervisorState
from tandem.deploy.on_ray.hosted_ray import namespace_of
from tandem.deploy.on_ray.joined_ray import JoinedRay
from tandem.deploy.supervise.progress import StartProgress
from tandem.router.config import RouterAddresses

WATCH_INTERVAL_S = 0.5
_NEVER_THERE = "the cluster's supervisor has ended before it said anything; Ray's logs say why, or somebody stopped it"

# Called with the model's name, the client addresses, and each router's own.
Announce = Callable[[str, ClientAddresses, Mapping[str, RouterAddresses]], None]


def serve_joined(config: ClusterConfig, announce: Announce, *, detach: bool, stop_grace_s: float) -> int:
    """Returns the exit status once the cluster has stopped, or with `detach` once it is ready."""
    run = functools.partial(_run, config, announce, detach=detach, stop_grace_s=stop_grace_s)
    return run_guarded(run, stop_grace_s=stop_grace_s)


def _run(config: ClusterConfig, announce: Announce, *, detach: bool, stop_grace_s: float) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    console = Console()
    stop = threading.Event()

    def stop_joining(signum: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signum, signal.SIG_IGN)
        stop.set()
        raise SystemExit(0)

    def on_stop(signum: int, frame: FrameType | None) -> None:
        # Ignore repeats: set() holds a lock.
        signal.signal(signum, signal.SIG_IGN)
        stop.set()

    joined = JoinedRay(config.ray_address, namespace_of(config.cluster_name), ship_code=config.ship_code)
    try:
        signal.signal(signal.SIGTERM, stop_joining)
        joined.start(0)
        signal.signal(signal.SIGTERM, on_stop)
        if stop.is_set():
            return 0
        cluster = RemoteCluster.create(config)
        watch = _Watch(cluster, console, stop, stop_grace_s)
        status = watch.start()
        if status is None:
            announce(watch.model_name, watch.addresses, watch.routers)
            status = 0 if detach else watch.wait()
        return status
    except NameOnRayTakenError as error:
        return _fail(
            f"a cluster named {error} is on the Ray at {config.ray_address} already; give this one another --name, or "
            f"stop that one: tandem stop {error} --ray-address {config.ray_address}",
            exit_codes.USAGE,
        )
    except (ValueError, OSError) as error:
        return _fail(in_flags(str(error), OPTIONS), exit_codes.USAGE)
    except RayEndedError:
        return _fail(f"Ray has ended, and the cluster with it; {joined.log_directory} says why", exit_codes.FAILED)
    except SystemExit:
        if not stop.is_set():
            raise
        return 0
    finally:
        joined.stop()


class _Watch:
    def __init__(
        self,
        cluster: RemoteCluster,
        console: Console,
        stop: threading.Event,
        stop_limit_s: float,
    ) -> None:
        self._cluster = cluster
        self._console = console
        self._stop = stop
        self._stop_limit_s = stop_limit_s
        self.model_name = ""
        self.addresses = ClientAddresses("", "")
        self.routers: dict[str, RouterAddresses] = {}

    def start(self) -> int | None:
        """Returns the exit status if the start fails or is stopped, else None."""
        state: SupervisorState | None = None
        with StartProgress(self._console, started_s_ago=RunOwner.of_launcher().guard.age_s()) as progress:
            while not self._stop.wait(POLL_INTERVAL_S):
                try:
                    seen = self._cluster.look()
                except GoneError:
                    # `tandem stop` kills the supervisor before this command can read its end.
                    return self._was_stopped() if state is not None else _fail(_NEVER_THERE, exit_codes.FAILED)
                if seen is None:
                    continue
                state = seen
                for line in state.lines:
                    self._show(line)
                for part, doing in state.parts.items():
                    progress(part, doing)
                if state.phase == ENDED:
                    return self._has_ended(state)
                if state.phase == SERVING:
                    break
        if state is None or self._stop.is_set():
            return self._end()
        self._console.print(f"Ready after {progress.seconds:.1f} s", highlight=False)
        self.model_name, self.addresses = state.model_name, ClientAddresses(state.grpc, state.http)
        self.routers = state.routers
        return None

    def wait(self) -> int:
        while not self._stop.wait(WATCH_INTERVAL_S):
            try:
                state = self._cluster.look()
            except GoneError:
                return self._was_stopped()
            if state is None:
                continue
            for line in state.lines:
                self._show(line)
            if state.phase == ENDED:
                return self._has_ended(state)
        return self._end()

    def _end(self) -> int:
        self._console.print("Stopping")
        self._cluster.stop(self._show, limit_s=self._stop_limit_s)
        return 0

    def _has_ended(self, state: SupervisorState) -> int:
        self._cluster.end()
        if not state.error:
            return self._was_stopped()
        return _fail(in_flags(state.error, OPTIONS), exit_codes.USAGE if state.is_usage else exit_codes.FAILED)

    def _was_stopped(self) -> int:
        self._console.print("The cluster was stopped")
        return 0

    def _show(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _fail(message: str, status: int) -> int:
    print(f"tandem: {message}", file=sys.stderr)
    return status
