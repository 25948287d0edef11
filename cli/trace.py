"""`tandem trace`: records what a cluster does, into a file for Perfetto."""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cli.trace_events import Trace
from tandem import exit_codes

if TYPE_CHECKING:
    from tandem.client import TandemClient


def run_trace(arguments: argparse.Namespace, client: "TandemClient") -> int:
    """Returns the exit status."""
    from cli.terminal import print_failure
    from tandem.client import TandemError

    trace = Trace()
    # An older file stays until there is a whole new one. What cannot be written is told of before anybody waits.
    unfinished = Path(f"{arguments.out}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            print(f"recording for {arguments.seconds:g} s", file=sys.stderr)
            for part in client.record(arguments.seconds):
                trace.add(part)
            json.dump(trace.as_json(), file, separators=(",", ":"))
        unfinished.replace(arguments.out)
    except TandemError as error:
        return print_failure(arguments, error)
    except OSError as error:
        print(f"{arguments.name}: {error}", file=sys.stderr)
        return exit_codes.FAILED
    except KeyboardInterrupt:
        return exit_codes.SIGNALLED + signal.SIGINT
    finally:
        unfinished.unlink(missing_ok=True)
    for warning in trace.warnings:
        print(f"{arguments.name}: {warning}", file=sys.stderr)
    print(f"{trace.num_slices} slices in {arguments.out}: open it at https://ui.perfetto.dev")
    return 0
