"""Runs `tandem bench`."""

import argparse
import os
import signal
import sys

from rich.console import Console

from tandem import exit_codes
from tandem.bench.clients.base import EndpointError
from tandem.bench.command import Outputs, compare, plot_gaps, run_once, run_sweep
from tandem.deploy.cli.bench_config import bench_config
from tandem.deploy.cli.starting import name_starting


def run_bench(arguments: argparse.Namespace, default_address: str) -> int:
    outputs = Outputs(arguments.out, arguments.requests_out, arguments.plots, arguments.report)
    console = Console()
    try:
        config = bench_config(arguments, os.environ, default_address)
        if arguments.sweep is None:
            result = run_once(config, outputs, console)
        else:
            result = run_sweep(config, arguments.sweep, arguments.good_share, outputs, console)
    except (EndpointError, RuntimeError, OSError, ValueError) as error:
        return _failure(arguments, error)
    except KeyboardInterrupt:
        print()
        return exit_codes.SIGNALLED + signal.SIGINT
    if not result["is_whole"]:
        return exit_codes.SIGNALLED + signal.SIGINT
    return 0 if result["requests"]["num_whole"] else exit_codes.FAILED


def run_comparison(arguments: argparse.Namespace) -> int:
    make = {"report": compare, "plot": plot_gaps}[arguments.comparison]
    try:
        make(arguments.runs, arguments.out)
    except (ValueError, OSError) as error:
        return _failure(arguments, error)
    print(f"wrote {arguments.out}")
    return 0


def _failure(arguments: argparse.Namespace, error: Exception) -> int:
    print(f"{arguments.name}: {name_starting(str(error))}", file=sys.stderr)
    return exit_codes.USAGE if isinstance(error, ValueError) else exit_codes.FAILED
