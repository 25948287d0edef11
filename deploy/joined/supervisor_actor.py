"""The launcher of a cluster as a Ray actor: it outlives whoever created it, and Ray starts it again when it has died.

Another life of it takes over what runs. A command asks it over Ray calls, none of which waits for long.

What it is to do it is told once it is there, because Ray keeps what an actor is created with and carries it to other
hosts in the clear. Another life finds that among its notes, which the cluster's processes have the key to.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem import logs
from tandem.config import LogConfig
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.on_ray.sealed_actor import ORDER_TIMEOUT_S, SealedActor

if TYPE_CHECKING:
    from tandem.deploy.launcher import Cluster, ClusterState
    from tandem.deploy.on_ray.hosted_ray import HostedRay
    from tandem.deploy.supervise.scaling import ScaleJob

logger = logging.getLogger(__name__)

STARTING, SERVING, STOPPING, ENDED = "starting", "serving", "stopping", "ended"
_MAX_LINES = 2000
_DRAIN_REPORT_INTERVAL_S = 1.0
_ORDER_POLL_S = 0.2
# So long its last words can be asked for.
_FAREWELL_S = 5.0


@dataclass(frozen=True)
class SupervisorOrder:
    """What it is told. Attributes: environment: what of that of whoever starts the cluster says where models are."""

    config: ClusterConfig
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class SupervisorState:
    """What a command is told.

    Attributes:
        life: another one has begun its lines anew.
        phase: STARTING, SERVING, STOPPING or ENDED.
        parts: what each part of the cluster does while it starts.
        lines: what was said from the number on that was asked for.
        next_line: the number of the line after these.
        grpc, http: the clients' ports; "" before they are known.
        model_name: what clients call the model.
        error: why it has ended, or "" for a stop that was asked for.
        is_usage: whether whoever started it can put that right.
    """

    life: str
    phase: str
    parts: dict[str, str]
    lines: list[str]
    next_line: int
    grpc: str
    http: str
    model_name: str
    error: str
    is_usage: bool


class SupervisorActor(SealedActor[SupervisorOrder]):
    """Runs the cluster on a thread of its own."""

    def __init__(self, ray_address: str, cluster_name: str, spans_nodes: bool) -> None:
        super().__init__(None)
        self._place = (ray_address, cluster_name, spans_nodes)
        self._life = f"{os.getpid()}-{time.time_ns()}"
        self._phase = STARTING
        self._parts: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._num_lines = 0
        self._error, self._is_usage = "", False
        self._log_directory: str | None = None
        self._stop = threading.Event()
        self._stoppers: set[str] = set()
        self._cluster: Cluster | None = None
        self._jobs: list[ScaleJob] = []
        self._thread = threading.Thread(target=self._run, name="cluster")
        self._thread.start()

    def state(self, from_line: int = 0) -> SupervisorState:
        """Args: from_line: the number of the first line that is asked for."""
        lines = list(self._lines)
        next_line = self._num_lines
        first = next_line - len(lines)
        addresses = self._cluster.addresses if self._cluster is not None else None
        return SupervisorState(
            self._life,
            self._phase,
            dict(self._parts),
            lines[max(0, from_line - first) :],
            next_line,
            addresses.grpc if addresses else "",
            addresses.http if addresses else "",
            self._cluster.model_name if self._cluster is not None else "",
            self._error,
            self._is_usage,
        )

    def log_directory(self) -> str | None:
        """Where the cluster's processes write their logs, each on its node; "": where Ray has them; None: it does not
        know yet."""
        return self._log_directory

    def stop(self, who: str) -> None:
        """Asks it to drain and to end. What is asked for by a second one is to end at once.

        Args:
            who: asks, for nobody knows whether an earlier life of this process was told.
        """
        self._stoppers.add(who)
        self._stop.set()

    def scale(self, counts: Mapping[str, int]) -> int:
        """As Cluster.scale; returns the number under which scale_lines knows it. Raises ValueError while it does not
        serve."""
        if self._cluster is None or self._phase != SERVING:
            raise ValueError(f"the cluster is {self._phase}")
        self._jobs.append(self._cluster.scale(counts))
        return len(self._jobs) - 1

    def scale_lines(self, number: int, timeout_s: float) -> tuple[list[str], bool, str, bool]:
        """What was done since this was last asked, within timeout_s; whether that was all; why it could not be
        done; and whether the one who asked can put that right."""
        if number >= len(self._jobs):
            raise ValueError("the cluster's supervisor was started again meanwhile; ask once more")
        job = self._jobs[number]
        line = job.next_line(timeout_s)
        return [line] if line else [], line is None, job.error, job.is_usage

    def _run(self) -> None:
        from tandem.deploy.errors import ClusterError, ConfigurationError
        from tandem.deploy.launcher import Cluster
        from tandem.deploy.on_ray.hosted_ray import ORDER, HostedRay
        from tandem.deploy.on_ray.ray_module import ray

        address, name, spans_nodes = self._place
        hosted = HostedRay(address, name, spans_nodes=spans_nodes)
        try:
            order, saved = self._find_out(hosted)
            config = order.config
            self._log_directory = config.log_dir
            os.environ.update(order.environment)
            cluster = self._cluster = Cluster(config, self._on_progress, self._say, hosted)
            try:
                logs.configure("supervisor", LogConfig(config.log_level, config.log_dir))
            except ValueError as error:
                raise ConfigurationError(str(error)) from error
            logging.getLogger("tandem.deploy").addHandler(_LineHandler(self._say))
            if saved is not None:
                logger.warning("the supervisor is back, and takes over what runs")
                cluster.recover(saved)
            else:
                # Whoever ended another supervisor of this name may have been ended before it ended the rest.
                hosted.end_all()
                hosted.forget()
                hosted.save(ORDER, order)
                cluster.start()
            if not cluster.is_draining:
                self._phase = SERVING
                cluster.supervise(self._stop)
            self._phase = STOPPING
            self._drain(cluster)
        except ClusterError as error:
            self._error, self._is_usage = str(error), isinstance(error, ConfigurationError)
        except _StoppedError:
            pass
        except BaseException as error:
            logger.exception("the supervisor failed")
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._phase = STOPPING
            try:
                if self._cluster is not None:
                    self._cluster.stop()
                else:
                    hosted.end_all()
                    hosted.forget()
            except Exception as error:
                logger.exception("what is left of the cluster could not be stopped")
                self._error = self._error or f"{type(error).__name__}: {error}"
            self._phase = ENDED
            time.sleep(_FAREWELL_S)
            # Its name is free for another cluster from now on.
            ray.kill(ray.get_runtime_context().current_actor)

    def _find_out(self, hosted: "HostedRay") -> "tuple[SupervisorOrder, ClusterState | None]":
        """What this life of the cluster is, and what an earlier life of this process has noted of it, or None.

        Raises:
            ClusterError: nobody is left who knows.
        """
        from tandem.deploy.errors import ClusterError
        from tandem.deploy.on_ray.hosted_ray import ORDER, STATE

        deadline = time.monotonic() + ORDER_TIMEOUT_S
        while time.monotonic() < deadline:
            if (order := hosted.saved(ORDER)) is not None and (saved := hosted.saved(STATE)) is not None:
                return order, saved
            # Whoever starts the cluster tells every life of this process, so what runs is asked first.
            with contextlib.suppress(TimeoutError):
                return self._wait_order(_ORDER_POLL_S), None
            if self._stop.is_set():
                raise _StoppedError
        raise ClusterError(
            "the supervisor knows nothing of its cluster: neither a process of it nor the command that started it is "
            "left to tell; start it again"
        )

    def _on_progress(self, part: str, doing: str) -> None:
        self._parts[part] = doing
        if self._phase == STARTING and self._stop.is_set():
            raise _StoppedError

    def _drain(self, cluster: "Cluster") -> None:
        deadline = time.monotonic() + cluster.begin_drain()
        num_left, shown = cluster.drain(0.0), 0
        while num_left and (remaining_s := deadline - time.monotonic()) > 0 and len(self._stoppers) < 2:
            if num_left != shown:
                self._say(f"Requests left: {num_left}; waiting {remaining_s:.0f} s at most")
                shown = num_left
            num_left = cluster.drain(min(_DRAIN_REPORT_INTERVAL_S, remaining_s))
        if num_left:
            self._say(f"Requests cut short: {num_left}")

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._num_lines += 1


class _StoppedError(Exception):
    """A stop was asked for before the cluster was ready."""


class _LineHandler(logging.Handler):
    """Has whoever watches the cluster see its warnings."""

    def __init__(self, say: Any) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))
