"""Runs a cluster in the foreground until a signal stops it, and leaves nothing behind."""

import logging
import signal
import sys
import threading
from collections.abc import Callable

from rich.console import Console

from deploy.guard import run_guarded
from deploy.launcher import Cluster, ClusterError
from deploy.process_tree import descendants
from deploy.progress import StartProgress
from deploy.run_record import RunOwner, default_directory, end_leftovers, remove_record, write_record
from tandem.cluster_config import ClusterConfig

EXIT_USAGE = 2
EXIT_FAILED = 1


def serve(config: ClusterConfig) -> int:
    """`tandem serve`: returns the exit status."""
    return run_cluster(config, _announce_and_wait)


def run_cluster(config: ClusterConfig, use: Callable[[Cluster, threading.Event], int]) -> int:
    """Starts a cluster in a guarded child process, calls `use` with it there, and stops it; returns the exit status.

    Args:
        use: given the running cluster and an event that is set when the cluster is asked to stop. Its result is the
            exit status.
    """
    return run_guarded(lambda: _run(config, use))


def _run(config: ClusterConfig, use: Callable[[Cluster, threading.Event], int]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    console = Console()
    directory = default_directory()
    try:
        left = end_leftovers(directory)
    except PermissionError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return EXIT_FAILED
    if left:
        console.print(f"Ended {len(left)} processes that a killed cluster had left behind.")
    owner = RunOwner.of_launcher()
    stop = threading.Event()
    progress = StartProgress(console)

    def on_progress(part: str, doing: str) -> None:
        progress(part, doing)
        # Kept up to date while processes come into being, so that the next start knows of them whatever happens.
        write_record(directory, owner, descendants())

    cluster = Cluster(config, on_progress)
    try:
        with progress:
            cluster.start()
        # Only now: ray.init sets a handler of its own.
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        write_record(directory, owner, descendants())
        return use(cluster, stop)
    except ClusterError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        cluster.stop()
        remove_record(directory, owner)


def _announce_and_wait(cluster: Cluster, stop: threading.Event) -> int:
    console = Console(highlight=False)
    console.print(f"\nServing [bold]{cluster.model_name}[/] over gRPC at [bold]{cluster.addresses.grpc}[/]")
    console.print('Try: tandem generate "What is the capital of France?"   (Ctrl-C stops the cluster)')
    cluster.supervise(stop)
    console.print("Stopping")
    return 0
