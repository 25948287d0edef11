"""Commands for clusters of this user on this host, found by name."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from tandem import exit_codes
from tandem.deploy.config.bounds import SizedKind
from tandem.deploy.config.cluster_options import OPTIONS
from tandem.deploy.config.options import in_flags
from tandem.deploy.host.process_tree import send_signal
from tandem.deploy.host.run_record import Run, default_directory, find_runs, logs_of_detached
from tandem.deploy.supervise.control import ask
from tandem.logs import log_file
from tandem.processes import ProcessId

_LOOK_INTERVAL_S = 0.1
_SWEEP_S = 15.0


def list_clusters() -> int:
    try:
        runs = find_runs(default_directory())
    except PermissionError as error:
        return fail(str(error))
    if not runs:
        print("no cluster runs on this host")
        return 0
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in ("cluster", "state", "pid", "gRPC at", "HTTP at"):
        table.add_column(column)
    for run in runs:
        table.add_row(run.about.name, run.about.state, str(run.owner.guard.pid), run.about.grpc, run.about.http)
    Console(highlight=False).print(table)
    return 0


def local_address_of(name: str) -> str:
    """Returns the gRPC address; "" after an error message."""
    if (run := _find(name)) is None:
        return ""
    if run.about.state != "serving":
        fail(f"the cluster {name} is {run.about.state}")
        return ""
    return run.about.grpc.replace("0.0.0.0:", "127.0.0.1:")


def stop_cluster(name: str) -> int:
    if (run := _find(name)) is None:
        return exit_codes.FAILED
    guard = run.owner.guard
    with contextlib.ExitStack() as open_files:
        log = _open_end(open_files, run.about.log)
        send_signal(guard, signal.SIGTERM)
        deadline = time.monotonic() + run.about.stop_limit_s + _SWEEP_S
        while guard.is_alive():
            if time.monotonic() > deadline:
                return fail(f"the cluster {name} has not ended; its guard is process {guard.pid}")
            _show_more(log)
            time.sleep(_LOOK_INTERVAL_S)
        _show_more(log)
    print(f"The cluster {name} has ended")
    return 0


def scale_cluster(name: str, counts: Mapping[SizedKind, str]) -> int:
    return _ask(name, {"do": "scale", "counts": counts})


def restart_process(name: str, process: str) -> int:
    return _ask(name, {"do": "restart", "process": process})


def _ask(name: str, question: Mapping[str, Any]) -> int:
    if (run := _find(name)) is None:
        return exit_codes.FAILED
    if run.about.state != "serving":
        return fail(f"the cluster {name} is {run.about.state}")
    try:
        return show_answer(name, ask(run.control_path, question))
    except OSError as error:
        return fail(f"the cluster {name} does not answer: {error.strerror or error}")


def show_answer(name: str, answer: Iterable[Mapping[str, Any]]) -> int:
    for line in answer:
        if "error" in line:
            if line["error"]:
                return fail(in_flags(line["error"], OPTIONS), exit_codes.USAGE if line.get("is_usage") else 1)
            return 0
        if line["line"]:
            print(line["line"], flush=True)
    return fail(f"the cluster {name} has ended meanwhile")


def show_logs(name: str, process: str, *, follow: bool) -> int:
    if (run := _find(name)) is None:
        return exit_codes.FAILED
    about = run.about
    if process and not about.log_dir:
        return fail(
            f"the processes of {name} write their logs to Ray's session directory, under "
            f"{default_directory() / 'ray'} unless RAY_TMPDIR was set: start it with --log-dir or --detach to see them"
        )
    if not process and not about.log:
        more = (
            f"its processes have logs (tandem logs {name} PROCESS)"
            if about.log_dir
            else "start it with --detach to see its output here"
        )
        return fail(f"the cluster {name} prints to the terminal that it was started in; {more}")
    if "/" in process:
        return fail(f"{process} is no process of the cluster", exit_codes.USAGE)
    path = log_file(about.log_dir, process) if process else Path(about.log)
    try:
        while _show_file(path, run.owner.guard if follow else None):
            pass
    except FileNotFoundError:
        known = sorted(found.stem for found in path.parent.glob("*.log") if str(found) != about.log)
        return fail(f"the cluster {name} has no log of {process or 'its own'}; there are: {', '.join(known)}")
    except OSError as error:
        return fail(f"{path} cannot be read: {error.strerror}")
    except KeyboardInterrupt:
        pass
    return 0


def _find(name: str) -> Run | None:
    """Returns None after an error message."""
    try:
        runs = find_runs(default_directory())
    except PermissionError as error:
        fail(str(error))
        return None
    for run in runs:
        if run.about.name == name:
            return run
    others = ", ".join(run.about.name for run in runs)
    there_are = f"; there are: {others}" if others else ""
    logs = logs_of_detached(default_directory(), name)
    last_logs = f"; the last one's logs are in {logs}" if logs.is_dir() else ""
    fail(f"no cluster named {name} runs on this host{there_are}{last_logs}")
    return None


def _show_file(path: Path, followed: ProcessId | None) -> bool:
    """Shows a log, and with `followed` what is added until that process ends. Returns whether a new log has begun."""
    with path.open(encoding="utf-8", errors="replace") as file:
        _show_more(file)
        while followed is not None and followed.is_alive():
            time.sleep(_LOOK_INTERVAL_S)
            is_old = _is_other_file(path, file)
            _show_more(file)
            if is_old:
                return True
    return False


def _is_other_file(path: Path, file: TextIO) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    # Renamed, and the new one is still to come.
    return False


def _open_end(open_files: contextlib.ExitStack, path: str) -> TextIO | None:
    log = None
    with contextlib.suppress(OSError):
        if path:
            log = open_files.enter_context(Path(path).open(encoding="utf-8", errors="replace"))  # noqa: SIM115
            log.seek(0, os.SEEK_END)
    return log


def _show_more(log: TextIO | None) -> None:
    if log is not None and (text := log.read()):
        sys.stdout.write(text)
        sys.stdout.flush()


def fail(message: str, status: int = exit_codes.FAILED) -> int:
    print(f"tandem: {message}", file=sys.stderr)
    return status
