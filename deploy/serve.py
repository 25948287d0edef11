"""`tandem serve`: runs a cluster until a signal stops it, in the foreground or detached."""

import functools
import ipaddress
import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from tandem import exit_codes
from tandem.deploy.config.bounds import SIZED_KINDS, parse_counts
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.config.cluster_options import OPTIONS
from tandem.deploy.config.options import in_flags
from tandem.deploy.errors import ClusterError, ConfigurationError
from tandem.deploy.host.detach import run_detached
from tandem.deploy.host.guard import run_guarded
from tandem.deploy.host.names import ClusterName, NameTakenError
from tandem.deploy.host.ports import ClientAddresses
from tandem.deploy.host.process_tree import descendants
from tandem.deploy.host.run_record import (
    RunAbout,
    RunOwner,
    control_path,
    default_directory,
    end_leftovers,
    find_runs,
    logs_of_detached,
    remove_record,
    write_record,
)
from tandem.deploy.launcher import Cluster
from tandem.deploy.supervise.change import ChangeJob
from tandem.deploy.supervise.control import ControlServer
from tandem.deploy.supervise.progress import StartProgress
from tandem.private_directory import check_private
from tandem.processes import ProcessId
from tandem.router.config import RouterAddresses

# Time to stop after the drain.
STOP_GRACE_S = 20.0
DRAIN_REPORT_INTERVAL_S = 1.0
# An empty line then keeps the asking command from timing out.
SILENCE_S = 5.0
LAUNCHER_LOG = "tandem.log"


def serve(config: ClusterConfig, *, detach: bool = False) -> int:
    if not config.api_keys and not config.tls_client_ca and not _is_loopback(config.host):
        print(
            f"tandem: WARNING: {config.host} can be reached from other hosts, and without an API key any client there "
            "can use this cluster: set one with --api-key-file, or listen on 127.0.0.1",
            file=sys.stderr,
        )
    if config.ray_address:
        from tandem.deploy.joined.joined_serve import serve_joined

        stop = f"{_own_command()} stop {config.cluster_name} --ray-address {config.ray_address}"
        return serve_joined(
            config,
            functools.partial(announce, config, stop if detach else "Ctrl-C"),
            detach=detach,
            stop_grace_s=config.drain_timeout_s + STOP_GRACE_S,
        )
    directory = default_directory()
    try:
        # Refuse a name in use before anything else happens.
        ClusterName(directory, config.cluster_name).close()
        if not detach:
            return run_cluster(config, functools.partial(announce_and_wait, config), is_named=True)
        logs = logs_of_detached(directory, config.cluster_name)
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(logs)
    except NameTakenError:
        return _refuse_name(directory, config.cluster_name)
    except PermissionError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return exit_codes.FAILED
    if not config.log_dir:
        for old in (*logs.glob("*.log"), *logs.glob("*.log.*")):
            old.unlink()
        config = replace(config, log_dir=str(logs))
    log = logs / LAUNCHER_LOG

    def run(on_ready: Callable[[], None]) -> int:
        stop = f"{_own_command()} stop {config.cluster_name}"
        use = functools.partial(announce_and_wait, config, how_to_stop=stop, on_ready=on_ready)
        return run_cluster(config, use, is_named=True, log=str(log))

    return run_detached(run, log)


def _refuse_name(directory: Path, name: str) -> int:
    pids = [run.owner.guard.pid for run in find_runs(directory) if run.about.name == name]
    which = f" (pid {pids[0]})" if pids else ""
    print(
        f"tandem: a cluster named {name} runs here already{which}; give this one another --name, or stop that one: "
        f"tandem stop {name}",
        file=sys.stderr,
    )
    return exit_codes.USAGE


def run_cluster(
    config: ClusterConfig,
    use: Callable[[Cluster, threading.Event], int],
    *,
    is_named: bool = False,
    log: str = "",
) -> int:
    """Starts a cluster in a guarded child process, calls `use` there, and stops the cluster.

    Args:
        use: gets the running cluster and an event that a stop request sets; returns the exit status.
        is_named: let commands find the cluster by name.
        log: receives the output; "": the terminal.

    Returns:
        The exit status of `use`; 2 if the cluster cannot start as configured; 1 for other failures.
    """
    return run_guarded(lambda: _run(config, use, is_named, log), stop_grace_s=config.drain_timeout_s + STOP_GRACE_S)


def _run(config: ClusterConfig, use: Callable[[Cluster, threading.Event], int], is_named: bool, log: str) -> int:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s" if log else "%(levelname)s: %(message)s"
    )
    console = Console()
    directory = default_directory()
    try:
        ended = end_leftovers(directory)
        name = ClusterName(directory, config.cluster_name) if is_named else None
    except PermissionError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return exit_codes.FAILED
    except NameTakenError:
        return _refuse_name(directory, config.cluster_name)
    if ended:
        console.print(f"Ended {len(ended)} processes that a killed cluster had left behind.")
    about: RunAbout | None = None
    if is_named:
        # Commands that read the path may run in another directory.
        log_dir = str(Path(config.log_dir).absolute()) if config.log_dir else ""
        about = RunAbout(
            config.cluster_name, log=log, log_dir=log_dir, stop_limit_s=config.drain_timeout_s + STOP_GRACE_S
        )
    try:
        return _RecordedRun(config, console, directory, about).run(use)
    finally:
        if name is not None:
            name.close()


class _RecordedRun:
    def __init__(self, config: ClusterConfig, console: Console, directory: Path, about: RunAbout | None) -> None:
        self._config = config
        self._console = console
        self._directory = directory
        self._about = about
        self._owner = RunOwner.of_launcher()
        self._progress = StartProgress(console, started_s_ago=self._owner.guard.age_s())
        self._stop = threading.Event()
        self._start_is_stopped = False
        self._cluster = Cluster(config, self._on_progress, self._on_request_line)

    def run(self, use: Callable[[Cluster, threading.Event], int]) -> int:
        control: ControlServer | None = None
        try:
            signal.signal(signal.SIGTERM, self._stop_starting)
            with self._progress:
                self._cluster.start()
            if self._start_is_stopped:
                return 0
            self._console.print(f"Ready after {self._progress.seconds:.1f} s", highlight=False)
            signal.signal(signal.SIGTERM, self._stop_serving)
            signal.signal(signal.SIGHUP, self._look_at_files)
            if self._about is not None:
                path = control_path(self._directory, self._owner)
                control = ControlServer(path, functools.partial(_answer, self._cluster))
            self._record("serving")
            status = use(self._cluster, self._stop)
            if self._stop.is_set():
                self._record("stopping")
                _drain(self._cluster, self._config.drain_timeout_s, self._owner.guard, self._console)
            return status
        except SystemExit:
            if not self._start_is_stopped:
                raise
            # A requested stop is no failure, though Ray may turn it into another exit status.
            return 0
        except ClusterError as error:
            print(f"tandem: {in_flags(str(error), OPTIONS)}", file=sys.stderr)
            return exit_codes.USAGE if isinstance(error, ConfigurationError) else exit_codes.FAILED
        finally:
            if control is not None:
                control.close()
            self._cluster.stop()
            remove_record(self._directory, self._owner)
            if self._start_is_stopped:
                self._console.print("Stopped before it was ready")

    def _record(self, state: str = "") -> None:
        if self._about is not None:
            addresses = self._cluster.addresses
            self._about = replace(
                self._about, state=state or self._about.state, grpc=addresses.grpc, http=addresses.http
            )
        write_record(self._directory, self._owner, descendants(), self._about)

    def _on_progress(self, part: str, doing: str) -> None:
        if self._start_is_stopped:
            # A library swallowed the SystemExit.
            raise SystemExit(0)
        if (part, doing) == ("ray", "ready"):
            # Some versions of Ray install a SIGTERM handler that aborts.
            signal.signal(signal.SIGTERM, self._stop_starting)
        self._progress(part, doing)
        # The next start finds leftover processes there if this launcher is killed.
        self._record()

    def _on_request_line(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _stop_starting(self, signum: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signum, signal.SIG_IGN)
        self._start_is_stopped = True
        raise SystemExit(0)

    def _stop_serving(self, signum: int, frame: FrameType | None) -> None:
        # A second handler that interrupts set() would wait for its lock forever.
        signal.signal(signum, signal.SIG_IGN)
        self._stop.set()

    def _look_at_files(self, signum: int, frame: FrameType | None) -> None:
        self._cluster.look_at_files()


def _answer(cluster: Cluster, asked: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    job: ChangeJob
    match asked:
        case {"do": "scale", "counts": dict() as counts} if all(
            kind in SIZED_KINDS and isinstance(count, str) for kind, count in counts.items()
        ):
            job = cluster.scale(parse_counts(counts))
        case {"do": "restart", "process": str() as process}:
            job = cluster.restart(process)
        case _:
            yield {"error": "the cluster does not know this command: it runs another version of tandem"}
            return
    while (line := job.next_line(SILENCE_S)) is not None:
        yield {"line": line}
    yield {"error": job.error, "is_usage": job.is_usage}


def _drain(cluster: Cluster, timeout_s: float, guard: ProcessId, console: Console) -> None:
    deadline = time.monotonic() + timeout_s
    shown = 0
    num_left = cluster.drain(0.0)
    # Without a guard only a few seconds remain, and stopping needs them.
    while num_left and (remaining_s := deadline - time.monotonic()) > 0 and guard.is_alive():
        if num_left != shown:
            console.print(f"Requests left: {num_left}; waiting {remaining_s:.0f} s at most, Ctrl-C ends them now")
            shown = num_left
        num_left = cluster.drain(min(DRAIN_REPORT_INTERVAL_S, remaining_s))
    if num_left:
        console.print(f"Requests cut short: {num_left}")


def _own_command() -> str:
    """Returns the name or path that the caller can use again."""
    called = Path(sys.argv[0])
    if called.name != "tandem":
        return "tandem"
    on_path = shutil.which("tandem")
    return "tandem" if on_path and called.exists() and called.samefile(on_path) else str(called)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def announce_and_wait(
    config: ClusterConfig,
    cluster: Cluster,
    stop: threading.Event,
    *,
    how_to_stop: str = "Ctrl-C",
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    announce(config, how_to_stop, cluster.model_name, cluster.addresses, cluster.routers)
    on_ready()
    cluster.supervise(stop)
    print("Stopping", flush=True)
    return 0


def announce(
    config: ClusterConfig,
    how_to_stop: str,
    model_name: str,
    addresses: ClientAddresses,
    routers: Mapping[str, RouterAddresses],
) -> None:
    """Args: routers: each router's own addresses; shown if they are on several nodes."""
    console = Console(highlight=False)
    scheme = "https" if config.tls_cert else "http"
    url = f"{scheme}://{addresses.http}"
    console.print(
        f"\nServing [bold]{model_name}[/] over gRPC at [bold]{addresses.grpc}[/] and over HTTP at [bold]{url}[/]",
        soft_wrap=True,
    )
    if config.spans_nodes:
        for name, own in routers.items():
            console.print(f"{name}: gRPC at {own.grpc}, HTTP at {scheme}://{own.http}", soft_wrap=True)
    console.print(f"Live page: {url}/", soft_wrap=True)
    address = addresses.grpc.replace("0.0.0.0:", "127.0.0.1:")
    flags = [
        f"--address {address}",
        *(["--tls-ca CA.pem"] if config.tls_cert else []),
        *(["--tls-cert CERT.pem --tls-key KEY.pem"] if config.tls_client_ca else []),
        *(["--api-key KEY"] if config.api_keys else []),
    ]
    command = " ".join([_own_command(), "generate", *flags, '"What is the capital of France?"'])
    console.print(f"Try: {command}   (to stop the cluster: {how_to_stop})", soft_wrap=True)
