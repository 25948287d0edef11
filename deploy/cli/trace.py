"""`tandem trace`: records a cluster into a file for Perfetto."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem import exit_codes
from tandem.deploy.cli.trace_events import Trace

if TYPE_CHECKING:
    from tandem.client import TandemClient


def run_trace(arguments: argparse.Namespace, client: "TandemClient") -> int:
    from tandem.client import TandemError
    from tandem.deploy.cli.terminal import print_failure

    trace = Trace()
    out = Path(arguments.out)
    if out.exists() and not out.is_file():
        print(f"{arguments.name}: {out} is there and is no file", file=sys.stderr)
        return exit_codes.FAILED
    # Keeps an older file until the new one is complete, and finds an unwritable directory before the recording. The
    # process id keeps commands for the same target apart.
    unfinished = Path(f"{out}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            print(f"recording for {arguments.seconds:g} s", file=sys.stderr)
            for part in client.record(arguments.seconds):
                trace.add(part)
            json.dump(trace.as_json(), file, separators=(",", ":"))
        unfinished.replace(out)
    except TandemError as error:
        return print_failure(arguments, error)
    except OSError as error:
        print(f"{arguments.name}: {out} cannot be written: {error.strerror}", file=sys.stderr)
        return exit_codes.FAILED
    except KeyboardInterrupt:
        return exit_codes.SIGNALLED + signal.SIGINT
    finally:
        unfinished.unlink(missing_ok=True)
    for warning in trace.warnings:
        print(f"{arguments.name}: {warning}", file=sys.stderr)
    print(f"{trace.num_slices} slices in {out}: open it at https://ui.perfetto.dev")
    return 0
