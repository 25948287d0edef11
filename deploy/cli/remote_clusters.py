"""Commands for clusters on an existing Ray (--ray-address), found by name."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from tandem import exit_codes
from tandem.deploy.cli.clusters import fail, show_answer
from tandem.deploy.config.bounds import SizedKind
from tandem.deploy.joined.remote_cluster import GoneError, RayEndedError, RemoteCluster, RemoteError
from tandem.deploy.joined.remote_logs import LogError, LogReader, ProcessLog, find_logs, process_names
from tandem.deploy.joined.supervisor_actor import SERVING
from tandem.deploy.on_ray.hosted_ray import find_clusters
from tandem.deploy.on_ray.joined_ray import JoinedRay

_LOOK_INTERVAL_S = 0.3
_LIVES_INTERVAL_S = 2.0
_STOP_LIMIT_S = 24 * 3600.0


def list_remote(address: str) -> int:
    def run() -> int:
        names = find_clusters()
        if not names:
            print(f"no cluster is on the Ray at {address}")
            return 0
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        for column in ("cluster", "state", "gRPC at", "HTTP at"):
            table.add_column(column)
        for name in names:
            found = RemoteCluster.find(name, address)
            with contextlib.suppress(GoneError):
                state = found.look() if found is not None else None
                table.add_row(name, *((state.phase, state.grpc, state.http) if state else ("does not answer", "", "")))
        Console(highlight=False).print(table)
        return 0

    return _joined(address, run)


def stop_remote(name: str, address: str) -> int:
    def use(cluster: RemoteCluster) -> int:
        cluster.stop(print, limit_s=_STOP_LIMIT_S)
        print(f"The cluster {name} has ended")
        return 0

    return _with_cluster(name, address, use)


def scale_remote(name: str, address: str, counts: Mapping[SizedKind, str]) -> int:
    return _change_remote(name, address, lambda cluster: cluster.scale(counts))


def restart_remote(name: str, address: str, process: str) -> int:
    return _change_remote(name, address, lambda cluster: cluster.restart(process))


def _change_remote(name: str, address: str, change: Callable[[RemoteCluster], Iterator[Mapping[str, Any]]]) -> int:
    def use(cluster: RemoteCluster) -> int:
        try:
            return show_answer(name, change(cluster))
        except RemoteError as error:
            return fail(str(error))

    return _with_cluster(name, address, use)


def show_remote_logs(name: str, address: str, process: str, *, follow: bool) -> int:
    def use(cluster: RemoteCluster) -> int:
        if process:
            return _show_process_logs(name, process, cluster, follow=follow)
        with contextlib.suppress(GoneError, KeyboardInterrupt):
            while True:
                if (state := cluster.look()) is not None:
                    for line in state.lines:
                        print(line, flush=True)
                if not follow:
                    break
                time.sleep(_LOOK_INTERVAL_S)
        return 0

    return _with_cluster(name, address, use)


def _show_process_logs(name: str, process: str, cluster: RemoteCluster, *, follow: bool) -> int:
    """Prints the logs of all starts; with `follow`, continues with the latest."""
    try:
        directory = cluster.log_directory()
        logs = find_logs(name, process, directory)
        if not logs:
            return fail(f"the cluster {name} has no {process}; there are: {', '.join(process_names(name))}")
        reader, positions = LogReader(), dict[ProcessLog, int]()
        for log in logs:
            if len(logs) > 1:
                print(f"--- {process} on {log.address}, process {log.pid} ---" if log.pid else f"--- {log.address} ---")
            try:
                text, position = reader.read(log, None)
            except LogError as error:
                if log is logs[-1]:
                    raise
                print(error)
                continue
            print(text, end="", flush=True)
            positions[log] = position
        if follow:
            with contextlib.suppress(GoneError):
                _follow(name, process, directory, cluster, reader, positions)
    except (LogError, RemoteError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        pass
    return 0


def _follow(
    name: str,
    process: str,
    directory: str,
    cluster: RemoteCluster,
    reader: LogReader,
    positions: dict[ProcessLog, int],
) -> NoReturn:
    """Runs until GoneError or RayEndedError."""
    log = next(reversed(positions))
    look_at, said = time.monotonic() + _LIVES_INTERVAL_S, ""
    while True:
        time.sleep(_LOOK_INTERVAL_S)
        cluster.look()
        try:
            text, positions[log] = reader.read(log, positions.get(log))
            print(text, end="", flush=True)
        except LogError as error:
            # The node may come back, or the process restart elsewhere.
            if str(error) != said:
                said = str(error)
                print(said, flush=True)
        if (now := time.monotonic()) >= look_at:
            look_at = now + _LIVES_INTERVAL_S
            log = find_logs(name, process, directory)[-1]


def remote_address_of(name: str, address: str) -> str:
    """Returns "" after an error message."""
    found: list[str] = []

    def use(cluster: RemoteCluster) -> int:
        state = cluster.look()
        if state is None or state.phase != SERVING:
            return fail(f"the cluster {name} {'is ' + state.phase if state else 'does not answer'}")
        found.append(state.grpc.replace("0.0.0.0:", "127.0.0.1:"))
        return 0

    _with_cluster(name, address, use)
    return found[0] if found else ""


def _with_cluster(name: str, address: str, use: Callable[[RemoteCluster], int]) -> int:
    def run() -> int:
        cluster = RemoteCluster.find(name, address)
        if cluster is None:
            names = ", ".join(find_clusters())
            return fail(f"no cluster named {name} is on the Ray at {address}{f'; there are: {names}' if names else ''}")
        try:
            return use(cluster)
        except GoneError:
            return fail(f"the cluster {name} has ended meanwhile")
        except RayEndedError:
            return fail(f"the Ray at {address} has ended, and the cluster {name} with it")

    return _joined(address, run)


def _joined(address: str, run: Callable[[], int]) -> int:
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s: %(message)s")
    with _join(address) as error:
        return fail(error, exit_codes.USAGE) if error else run()


@contextlib.contextmanager
def _join(address: str) -> Iterator[str]:
    """Yields the reason of a failure, or ""."""
    ray = JoinedRay(address)
    error = ""
    try:
        try:
            ray.start(0)
        except (ValueError, OSError) as refusal:
            error = str(refusal)
        sys.stdout.flush()
        yield error
    finally:
        ray.stop()
