"""`tandem adapters`: lists, loads and unloads the adapters of a running cluster."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from tandem import exit_codes
from tandem.deploy.cli.client_options import add_connection_arguments, run_client
from tandem.deploy.cli.cluster_commands import AddCommand
from tandem.deploy.cli.serve_options import ADMIN_KEY_VARIABLE

if TYPE_CHECKING:
    from tandem.client import TandemClient

EXAMPLES = """\
The cluster needs --lora-root and --admin-key for load and unload. A relative path begins at --lora-root.

examples:
  tandem adapters
  tandem adapters load sql=sql-v2
  tandem adapters load sql=sql-v3 --in-place
  tandem adapters unload sql
"""


def add_adapters_command(add: AddCommand) -> None:
    adapters = add(
        "adapters",
        "list, load or unload adapters",
        "List the LoRA adapters of a running cluster, load one, or unload one.",
        EXAMPLES,
    )
    adapters.add_argument(
        "action", nargs="?", choices=("list", "load", "unload"), default="list", help="(default: list)"
    )
    adapters.add_argument(
        "adapter", nargs="?", default="", metavar="NAME[=PATH]", help="NAME=PATH to load, NAME to unload"
    )
    adapters.add_argument("--in-place", action="store_true", help="replace another content of this name")
    adapters.add_argument(
        "--cluster", default="", metavar="NAME", help="a cluster on this host (default: the one at --address)"
    )
    adapters.add_argument(
        "--admin-key",
        default=os.environ.get(ADMIN_KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"the cluster's admin key (default: ${ADMIN_KEY_VARIABLE})",
    )
    add_connection_arguments(adapters, _call)
    adapters.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    wanted = {"list": "no adapter", "load": "NAME=PATH", "unload": "NAME"}[arguments.action]
    name, given, path = arguments.adapter.partition("=")
    is_right = {"list": not arguments.adapter, "load": bool(name and path), "unload": bool(name and not given)}
    if not is_right[arguments.action]:
        print(f"{arguments.name}: {arguments.action} takes {wanted}", file=sys.stderr)
        return exit_codes.USAGE
    if arguments.action != "list" or not arguments.api_key:
        arguments.api_key = arguments.admin_key or arguments.api_key
    return run_client(arguments)


def _call(arguments: argparse.Namespace, client: "TandemClient") -> int:
    from tandem.client import TandemError
    from tandem.deploy.cli.status_tables import print_adapters
    from tandem.deploy.cli.terminal import print_failure
    from tandem.printable import printable

    name, _, path = arguments.adapter.partition("=")
    try:
        if arguments.action == "load":
            loaded = client.load_adapter(name, path, in_place=arguments.in_place)
            print(printable(f"Loaded {loaded.name} from {loaded.path}: rank {loaded.rank}, {loaded.content_hash}"))
        elif arguments.action == "unload":
            client.unload_adapter(name)
            print(printable(f"Unloaded {name}"))
        else:
            print_adapters(client.list_adapters())
    except TandemError as error:
        return print_failure(arguments, error, f"--admin-key KEY or ${ADMIN_KEY_VARIABLE}")
    return 0
