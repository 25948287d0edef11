"""Arguments of the client commands: connection and sampling."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem import exit_codes
from tandem.deploy.cli.cluster_commands import address_of
from tandem.deploy.cli.serve_options import API_KEY_VARIABLE
from tandem.deploy.config.cluster_options import DEFAULT_NAME

if TYPE_CHECKING:
    from tandem.client import TandemClient

ClientCommand = Callable[[argparse.Namespace, "TandemClient"], int]

DEFAULT_ADDRESS = "127.0.0.1:50051"
ADDRESS_VARIABLE = "TANDEM_ADDRESS"


def add_connection_arguments(parser: argparse.ArgumentParser, command: ClientCommand) -> None:
    group = parser.add_argument_group("connection")
    add = group.add_argument
    add(
        "--address",
        metavar="HOST:PORT",
        help=f"the cluster's gRPC port (default: ${ADDRESS_VARIABLE}, else {DEFAULT_ADDRESS})",
    )
    add(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"API key, if the cluster requires one (default: ${API_KEY_VARIABLE})",
    )
    add("--tls", action="store_true", help="connect over TLS and trust the default authorities")
    add("--tls-ca", default="", metavar="FILE", help="connect over TLS and trust the authorities of this PEM file")
    add(
        "--tls-cert", default="", metavar="FILE", help="PEM file with a client certificate, if the cluster requires one"
    )
    add("--tls-key", default="", metavar="FILE", help="PEM file with the private key of that certificate")
    parser.set_defaults(run=run_client, name=parser.prog, command=command)


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answer")
    group.add_argument(
        "--max-tokens", type=_positive, metavar="N", help="maximum output tokens (default: the server's choice)"
    )
    add_sampling_arguments(group)
    group.add_argument(
        "--priority", type=int, default=0, metavar="N", help="place in queues: more is sooner (default: %(default)s)"
    )
    group.add_argument("--model", default="", metavar="NAME", help="an adapter's name (default: the base model)")
    group.add_argument("--timings", action="store_true", help="print the request's timeline after the answer")


def add_sampling_arguments(parser: argparse._ActionsContainer) -> None:
    add = parser.add_argument
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: take the most likely token (default: %(default)s)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens that make up P (default: all)",
    )
    add("--seed", type=_seed, metavar="N", help="same seed, same answer (default: random)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 2**64:
        raise argparse.ArgumentTypeError("must have at most 64 bits and no sign")
    return seed


def run_client(arguments: argparse.Namespace) -> int:
    """Opens a client as the connection arguments say, and calls `arguments.command` with it."""
    from tandem.deploy.cli.terminal import open_client

    arguments.address_from = "" if arguments.address is None else "--address"
    if getattr(arguments, "cluster", "") or getattr(arguments, "ray_address", ""):
        arguments.cluster = arguments.cluster or DEFAULT_NAME
        if arguments.address_from:
            print(f"{arguments.name}: give a cluster's name or --address, not both", file=sys.stderr)
            return exit_codes.USAGE
        if not (found := address_of(arguments)):
            return exit_codes.FAILED
        arguments.address, arguments.address_from = found, f"the cluster {arguments.cluster}"
    if not arguments.address_from and (address := os.environ.get(ADDRESS_VARIABLE)):
        arguments.address, arguments.address_from = address, f"${ADDRESS_VARIABLE}"
    arguments.address = arguments.address if arguments.address_from else DEFAULT_ADDRESS
    try:
        client = open_client(arguments)
    except ValueError as error:
        print(f"{arguments.name}: {error}", file=sys.stderr)
        return exit_codes.USAGE
    with client:
        return arguments.command(arguments, client)
