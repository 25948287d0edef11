"""Runs a command that leaves its terminal once it is ready."""

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tandem import exit_codes

_LOOK_INTERVAL_S = 0.1
_READY = b"r"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_detached(main: Callable[[Callable[[], None]], int], log: Path) -> int:
    """Runs `main` in its own session, and shows its output until it is ready or ends.

    Until then Ctrl-C and SIGTERM stop the child; the death of this process or its terminal does not.

    Args:
        main: gets a function to call when ready; returns the exit status.
        log: file for the output, replaced.

    Returns:
        0 if the child is ready, else its exit status, or 128 + signal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    log.unlink(missing_ok=True)
    log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    reader, writer = os.pipe()
    # A stop before there is a handler would end this process alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reader)
        _run(main, log_fd, writer)
    os.close(writer)
    os.close(log_fd)
    before = {signum: signal.getsignal(signum) for signum in _STOP_SIGNALS}
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    for signum in _STOP_SIGNALS:
        signal.signal(signum, stop)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        if _show(log, reader):
            return 0
        status = _status(os.waitpid(pid, 0)[1])
        if received and not status:
            # Not 0: no cluster runs.
            print("Given up before it was ready", file=sys.stderr)
            return exit_codes.SIGNALLED + received[0]
        return status
    finally:
        os.close(reader)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _show(log: Path, reader: int) -> bool:
    with log.open(encoding="utf-8", errors="replace") as said:
        while True:
            has_news, _, _ = select.select([reader], [], [], _LOOK_INTERVAL_S)
            news = os.read(reader, 1) if has_news else None
            sys.stdout.write(said.read())
            sys.stdout.flush()
            if news is not None:
                return news == _READY


def _run(main: Callable[[Callable[[], None]], int], log_fd: int, writer: int) -> NoReturn:
    status = 1
    try:
        os.setsid()
        # There is no terminal to hang up. `run_guarded` takes it nevertheless, for files to be read again.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)

        def on_ready() -> None:
            # The parent may be gone.
            with contextlib.suppress(BrokenPipeError):
                os.write(writer, _READY)
            os.close(writer)

        status = main(on_ready)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)


def _status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else exit_codes.SIGNALLED - code
