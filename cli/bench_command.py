"""`tandem bench`, and what it says when it cannot."""

import argparse
import os
import signal
import sys

from rich.console import Console

from bench.clients.base import EndpointError
from bench.command import Outputs, run_once
from cli.bench_options import bench_config
from tandem import exit_codes


def run_bench(arguments: argparse.Namespace, default_address: str) -> int:
    """One run; returns the exit status."""
    try:
        config = bench_config(arguments, os.environ, default_address)
    except ValueError as error:
        return _failure(arguments, error, exit_codes.USAGE)
    outputs = Outputs(arguments.out, arguments.requests_out, arguments.plots, arguments.report)
    try:
        result = run_once(config, outputs, Console())
    except ValueError as error:
        return _failure(arguments, error, exit_codes.USAGE)
    except (EndpointError, RuntimeError, OSError) as error:
        return _failure(arguments, error, exit_codes.FAILED)
    except KeyboardInterrupt:
        print()
        return exit_codes.SIGNALLED + signal.SIGINT
    if not result["is_whole"]:
        return exit_codes.SIGNALLED + signal.SIGINT
    return 0 if result["requests"]["num_whole"] else exit_codes.FAILED


def _failure(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    print(f"{arguments.name}: {error}", file=sys.stderr)
    return status
