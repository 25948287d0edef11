"""A cluster's launcher as a Ray actor, which outlives the command.

Ray restarts it. The next life takes over the cluster: it reads its order from its notes, and their key from the
cluster's processes.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem import logs
from tandem.config import LogConfig
from tandem.deploy.config.bounds import SizedKind, parse_counts
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.on_ray.sealed_actor import ORDER_TIMEOUT_S, SealedActor
from tandem.router.config import RouterAddresses

if TYPE_CHECKING:
    from tandem.deploy.launcher import Cluster, ClusterState
    from tandem.deploy.on_ray.hosted_ray import HostedRay
    from tandem.deploy.supervise.change import ChangeJob

logger = logging.getLogger(__name__)

STARTING, SERVING, STOPPING, ENDED = "starting", "serving", "stopping", "ended"
_MAX_LINES = 2000
_DRAIN_REPORT_INTERVAL_S = 1.0
_ORDER_POLL_S = 0.2
# Commands can then read the last lines.
_FAREWELL_S = 5.0


@dataclass(frozen=True)
class SupervisorOrder:
    """Attributes: environment: the starting command's variables for finding and fetching models."""

    config: ClusterConfig
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class SupervisorState:
    """Answer to a command.

    Attributes:
        life: id of the actor's life, in which lines count from 0.
        phase: STARTING, SERVING, STOPPING or ENDED.
        parts: start-up step of each part of the cluster.
        lines: from the requested number on.
        grpc, http: client addresses; "" before they are known.
        routers: each router's own addresses, by name.
        error: reason of the end; "" after a requested stop.
        is_usage: the configuration caused the error.
    """

    life: str
    phase: str
    parts: dict[str, str]
    lines: list[str]
    next_line: int
    grpc: str
    http: str
    routers: dict[str, RouterAddresses]
    model_name: str
    error: str
    is_usage: bool


class SupervisorActor(SealedActor[SupervisorOrder]):
    order_type = SupervisorOrder

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
        self._jobs: list[ChangeJob] = []
        self._thread = threading.Thread(target=self._run, name="cluster")
        self._thread.start()

    def state(self, from_line: int = 0) -> SupervisorState:
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
            {} if self._cluster is None else self._cluster.routers,
            self._cluster.model_name if self._cluster is not None else "",
            self._error,
            self._is_usage,
        )

    def log_directory(self) -> str | None:
        """Returns "" for Ray's own directory; None: not known yet."""
        return self._log_directory

    def stop(self, who: str) -> None:
        """Drains and ends the cluster; a second requester ends the drain. Args: who: the requester's id."""
        self._stoppers.add(who)
        self._stop.set()

    def scale(self, counts: Mapping[SizedKind, str]) -> int:
        """Returns the job's number for `scale_lines`. Args: counts: as of the command line.

        Raises ValueError: the cluster does not serve.
        """
        return self._begin(lambda cluster: cluster.scale(parse_counts(counts)))

    def restart(self, process: str) -> int:
        """As `scale`."""
        return self._begin(lambda cluster: cluster.restart(process))

    def _begin(self, change: "Callable[[Cluster], ChangeJob]") -> int:
        if self._cluster is None or self._phase != SERVING:
            raise ValueError(f"the cluster is {self._phase}")
        self._jobs.append(change(self._cluster))
        return len(self._jobs) - 1

    def scale_lines(self, number: int, timeout_s: float) -> tuple[list[str], bool, str, bool]:
        """Returns a job's new lines, whether it is over, its error, and whether the request caused that."""
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
            order, saved = self._get_order(hosted)
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
                logger.warning("the supervisor is back, and takes over the running cluster")
                cluster.recover(saved)
            else:
                # Left by an earlier cluster of this name.
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
                logger.exception("the rest of the cluster could not be stopped")
                self._error = self._error or f"{type(error).__name__}: {error}"
            self._phase = ENDED
            time.sleep(_FAREWELL_S)
            # This frees the cluster's name.
            ray.kill(ray.get_runtime_context().current_actor)

    def _get_order(self, hosted: "HostedRay") -> "tuple[SupervisorOrder, ClusterState | None]":
        """Returns the order, and the state saved by an earlier life or None.

        Raises:
            ClusterError: no order came.
            ConfigurationError: the order does not fit this host.
        """
        from tandem.deploy.errors import ClusterError, ConfigurationError
        from tandem.deploy.launcher import ClusterState
        from tandem.deploy.on_ray.hosted_ray import ORDER, STATE

        deadline = time.monotonic() + ORDER_TIMEOUT_S
        while time.monotonic() < deadline:
            order = hosted.saved(ORDER, SupervisorOrder)
            if order is not None and (saved := hosted.saved(STATE, ClusterState)) is not None:
                return order, saved
            # The notes come first: the starting command sends its order to every life.
            try:
                return self._wait_order(_ORDER_POLL_S), None
            except TimeoutError:
                pass
            except ValueError as error:
                raise ConfigurationError(str(error)) from error
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
        self._lines.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        self._num_lines += 1


class _StoppedError(Exception):
    pass


class _LineHandler(logging.Handler):
    def __init__(self, say: Any) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))
