"""Arguments of the commands that find clusters by name."""

import argparse
import sys
from typing import Protocol

from tandem import exit_codes
from tandem.config import ROLES
from tandem.deploy.config.bounds import SIZED_KINDS, SizedKind, count_argument
from tandem.deploy.config.cluster_options import DEFAULT_NAME

LIST_EXAMPLES = """\
examples:
  tandem list
"""
LOGS_EXAMPLES = """\
Without PROCESS: the launcher's output. A cluster in the foreground prints it to its terminal.

examples:
  tandem logs
  tandem logs chat --follow
  tandem logs chat prefill-0
"""
SCALE_EXAMPLES = """\
A number stays until the next scale; LOW:HIGH lets the number follow the load between these bounds.
Requests continue: a leaving worker gets no new ones and ends when it has none left. After --drain-timeout,
its requests restart elsewhere and continue behind the tokens already sent.

examples:
  tandem scale --decode 3
  tandem scale chat --prefill 1 --decode 2
  tandem scale --workers 2:6
"""
RESTART_EXAMPLES = """\
A router's requests end within --drain-timeout, or go on at another router, for clients that resume streams. A worker's
begin again elsewhere after that time. The process starts from the tandem that is installed now; a version that cannot
join the running processes is refused before anything ends.

examples:
  tandem restart router-0
  tandem restart chat decode-1
"""
STOP_EXAMPLES = """\
Like Ctrl-C in the cluster's terminal: running requests may finish within --drain-timeout. A second stop ends them at
once.

examples:
  tandem stop
  tandem stop chat
"""


class AddCommand(Protocol):
    def __call__(self, name: str, summary: str, description: str, epilog: str) -> argparse.ArgumentParser: ...


def add_cluster_commands(add: AddCommand) -> None:
    clusters = add("list", "list this host's clusters", "List the clusters of this user on this host.", LIST_EXAMPLES)
    _add_ray_address(clusters)
    clusters.set_defaults(run=_list, name=clusters.prog)
    logs = add("logs", "show a cluster's logs", "Show the log of a cluster or of one of its processes.", LOGS_EXAMPLES)
    add_cluster_name(logs)
    logs.add_argument(
        "process", nargs="?", default="", metavar="PROCESS", help="such as router-0, prefill-0 or store-0"
    )
    logs.add_argument("--follow", action="store_true", help="keep printing new lines until Ctrl-C")
    logs.set_defaults(run=_logs, name=logs.prog)
    scale = add(
        "scale",
        "change the number of workers",
        "Start or end workers or routers of a cluster while it serves.",
        SCALE_EXAMPLES,
    )
    add_cluster_name(scale)
    for role in ROLES:
        scale.add_argument(
            f"--{role}", type=_count, metavar="N", help=f"{role} workers, or LOW:HIGH (default: unchanged)"
        )
    scale.add_argument(
        "--workers", dest="any", type=_count, metavar="N", help="workers of a cluster that was started with --workers"
    )
    scale.add_argument(
        "--routers",
        dest="router",
        type=_count,
        metavar="N",
        help="routers, at most as many as the cluster was started for",
    )
    scale.set_defaults(run=_scale, name=scale.prog)
    restart = add(
        "restart",
        "restart one process",
        "Restart a router, a worker or a page store while the cluster serves.",
        RESTART_EXAMPLES,
    )
    add_cluster_name(restart)
    restart.add_argument("process", metavar="PROCESS", help="such as router-0, prefill-0 or store-0")
    restart.set_defaults(run=_restart, name=restart.prog)
    stop = add("stop", "stop a cluster", "Stop a cluster of this user on this host.", STOP_EXAMPLES)
    add_cluster_name(stop)
    stop.set_defaults(run=_stop, name=stop.prog)


def add_cluster_name(
    parser: argparse.ArgumentParser,
    summary: str = f"name of the cluster (default: {DEFAULT_NAME})",
    default: str = DEFAULT_NAME,
) -> None:
    parser.add_argument("cluster", nargs="?", default=default, metavar="NAME", help=summary)
    _add_ray_address(parser)


def _add_ray_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray-address",
        default="",
        metavar="ADDRESS",
        help="address of the Ray that the cluster has joined",
    )


def _count(text: str) -> str:
    count = count_argument(text)
    if isinstance(count, int) and count < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return str(count)


def address_of(arguments: argparse.Namespace) -> str:
    if arguments.ray_address:
        from tandem.deploy.cli.remote_clusters import remote_address_of

        return remote_address_of(arguments.cluster, arguments.ray_address)
    from tandem.deploy.cli.clusters import local_address_of

    return local_address_of(arguments.cluster)


def _list(arguments: argparse.Namespace) -> int:
    if arguments.ray_address:
        from tandem.deploy.cli.remote_clusters import list_remote

        return list_remote(arguments.ray_address)
    from tandem.deploy.cli.clusters import list_clusters

    return list_clusters()


def _logs(arguments: argparse.Namespace) -> int:
    if arguments.ray_address:
        from tandem.deploy.cli.remote_clusters import show_remote_logs

        return show_remote_logs(arguments.cluster, arguments.ray_address, arguments.process, follow=arguments.follow)
    from tandem.deploy.cli.clusters import show_logs

    return show_logs(arguments.cluster, arguments.process, follow=arguments.follow)


def _scale(arguments: argparse.Namespace) -> int:
    from tandem.deploy.cli.clusters import scale_cluster

    counts: dict[SizedKind, str] = {
        kind: count for kind in SIZED_KINDS if (count := getattr(arguments, kind)) is not None
    }
    if not counts:
        print(
            f"{arguments.name}: how many? give --workers, or --prefill, --decode or --both, or --routers",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    if arguments.ray_address:
        from tandem.deploy.cli.remote_clusters import scale_remote

        return scale_remote(arguments.cluster, arguments.ray_address, counts)
    return scale_cluster(arguments.cluster, counts)


def _restart(arguments: argparse.Namespace) -> int:
    if arguments.ray_address:
        from tandem.deploy.cli.remote_clusters import restart_remote

        return restart_remote(arguments.cluster, arguments.ray_address, arguments.process)
    from tandem.deploy.cli.clusters import restart_process

    return restart_process(arguments.cluster, arguments.process)


def _stop(arguments: argparse.Namespace) -> int:
    if arguments.ray_address:
        from tandem.deploy.cli.remote_clusters import stop_remote

        return stop_remote(arguments.cluster, arguments.ray_address)
    from tandem.deploy.cli.clusters import stop_cluster

    return stop_cluster(arguments.cluster)
