"""Soaks a cluster of two prefill and two decode workers on the CPU, and checks every answer.

Clients send streams of many kinds without a pause. Meanwhile workers and routers are killed, stopped, restarted, added
and removed. Every answer must equal the same request's first one, made while nothing disturbed the cluster, and some
first answers are confirmed by transformers. Memory, descriptors, threads and mappings of every process must be flat.
At rest no page may be locked or leased. docs/soak.md says how to read the tables.

Exit status: 0 if all that held, 1 otherwise, 130 after Ctrl-C.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.served import StartError
from benchmarks.soak.cluster import SoakError
from benchmarks.soak.report import show
from benchmarks.soak.soak import Settings, run
from tandem.exit_codes import FAILED, SIGNALLED

_WIDTH = 110


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="duration (default: %(default)s)")
    parser.add_argument("--routers", type=int, default=2, metavar="N", help="router processes (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=6, metavar="N", help="requests at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the clients' choices")
    parser.add_argument(
        "--elastic", action="store_true", help="change sizes most of the time, and let the cluster follow its load"
    )
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="for logs, samples and results")
    arguments = parser.parse_args(argv)
    settings = Settings(
        arguments.minutes, arguments.routers, arguments.clients, arguments.seed, arguments.elastic, arguments.out
    )
    # Tables need their width, also in a file.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)

    def say(line: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, soft_wrap=True)

    try:
        outcome = run(settings, say)
    except (StartError, SoakError, RuntimeError, TimeoutError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return SIGNALLED + 2
    show(console, outcome)
    return 0 if outcome.has_passed else FAILED


if __name__ == "__main__":
    sys.exit(main())
