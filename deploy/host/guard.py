"""Ends all descendants of a command, however it ends.

The guard, the command's own process, forwards stop signals and cleans up. The launcher, its child, does the work. If
one is killed, the other ends all descendants. Both are subreapers, so orphans in other sessions are reparented to them.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, NoReturn

from tandem import exit_codes
from tandem.deploy.host.process_tree import end_descendants
from tandem.prctl import become_subreaper, die_with_parent

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_SWEEP_GRACE_S = 2.0
# Everything must be gone 10 s after the guard's death.
_ORPHAN_GRACE_S = 5.0
# `uv run` and others forward the terminal's Ctrl-C, which then arrives twice.
_SAME_STOP_S = 0.5
_KILL_WAIT_S = 5.0
# A shell that hangs up on its jobs may end, and its terminal with it, a moment later.
_HANGUP_SETTLE_S = 0.5
# si_code of signals from the terminal's keys (SI_KERNEL).
_SENT_BY_KERNEL = 0x80
_IDLE_WAIT_S = 60.0


def run_guarded(main: Callable[[], int], *, stop_grace_s: float = 20.0) -> int:
    """Runs `main` in a child process; returns its status once none of its descendants is left.

    SIGINT, SIGTERM and the loss of the terminal reach `main` as SIGTERM, maybe repeatedly. SIGTERM raises SystemExit
    unless `main` sets its own handler: set it after ray.init(), which sets one. The child is killed after
    `stop_grace_s`, on a second Ctrl-C, or on SIGQUIT. If this process is killed, `main` gets SIGTERM and a few seconds.
    atexit has no effect.

    Any other SIGHUP reaches `main` as SIGHUP, also if it is ignored here; without a handler of `main` it does nothing.

    The calling process must have one thread and no children. A signal's status is 128 + signal.
    """
    if threading.active_count() > 1:
        # PDEATHSIG reports the death of the forking thread.
        raise RuntimeError("run_guarded() needs a process with a single thread")
    become_subreaper()
    # Signals ignored from the start (nohup, background jobs) stay ignored.
    ignored = {s for s in _STOP_SIGNALS if signal.getsignal(s) is signal.SIG_IGN}
    stop_signals = set(_STOP_SIGNALS) - ignored | {signal.SIGTERM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Background jobs ignore the terminal's Ctrl-C, but `kill -INT` counts: blocked, even an ignored signal is queued.
    waited_for = stop_signals | {signal.SIGCHLD, signal.SIGINT, signal.SIGHUP}
    ends_with_terminal = signal.SIGHUP in stop_signals and _has_terminal()
    # Blocked signals stay pending, so none is lost between a check and a wait.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        guard_pid = os.getpid()
        # Opened before the fork: in the launcher, the guard could be dead already.
        guard_fd = os.pidfd_open(guard_pid)
        stop_fd, hangup_fd = os.eventfd(0), os.eventfd(0)
        launcher_pid = os.fork()
        if launcher_pid == 0:
            watch = _GuardWatch(guard_fd, stop_fd, hangup_fd, min(stop_grace_s, _ORPHAN_GRACE_S))
            _launch(main, guard_pid, watch, stop_signals)
        os.close(guard_fd)
        asks = _Asks(stop_fd, hangup_fd, signal.SIGINT in ignored, ends_with_terminal)
        status = _watch(launcher_pid, asks, waited_for, stop_grace_s)
        os.close(stop_fd)
        os.close(hangup_fd)
        end_descendants(_SWEEP_GRACE_S)
        _reap()
        return status
    finally:
        while signal.sigtimedwait(waited_for, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal that is open at its other end."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class _Asks(NamedTuple):
    """How signals to the guard reach the launcher.

    Attributes:
        stop_fd, hangup_fd: counted events that ask for a stop, and pass SIGHUP on.
        in_background: the terminal's Ctrl-C is not for this command.
        ends_with_terminal: the loss of the terminal stops the command.
    """

    stop_fd: int
    hangup_fd: int
    in_background: bool
    ends_with_terminal: bool

    def is_stop(self, received: signal.struct_siginfo) -> bool:
        if received.si_signo == signal.SIGINT:
            return not (self.in_background and received.si_code == _SENT_BY_KERNEL)
        if received.si_signo != signal.SIGHUP:
            return True
        if self.ends_with_terminal:
            time.sleep(_HANGUP_SETTLE_S)
            if not _has_terminal():
                return True
        os.eventfd_write(self.hangup_fd, 1)
        return False


def _watch(launcher_pid: int, asks: _Asks, waited_for: set[signal.Signals], stop_grace_s: float) -> int:
    asked_at: float | None = None
    killed = False
    deadline = float("inf")
    while True:
        statuses = _reap()
        if launcher_pid in statuses:
            code = os.waitstatus_to_exitcode(statuses[launcher_pid])
            return code if code >= 0 else exit_codes.SIGNALLED - code
        now = time.monotonic()
        if now >= deadline:
            if killed:
                # The launcher is stuck in the kernel.
                return exit_codes.SIGNALLED + signal.SIGKILL
            os.kill(launcher_pid, signal.SIGKILL)
            killed = True
            deadline = now + _KILL_WAIT_S
        received = signal.sigtimedwait(waited_for, min(_IDLE_WAIT_S, max(0.0, deadline - now)))
        if received is None or received.si_signo == signal.SIGCHLD or killed:
            continue
        if received.si_signo == signal.SIGHUP and asked_at is not None:
            # The kernel and the shell report the loss of one terminal.
            continue
        if not asks.is_stop(received):
            continue
        now = time.monotonic()
        if received.si_signo == signal.SIGQUIT or (asked_at is not None and now - asked_at > _SAME_STOP_S):
            deadline = now
        elif asked_at is None:
            os.eventfd_write(asks.stop_fd, 1)
            asked_at = now
            deadline = now + stop_grace_s


def _reap() -> dict[int, int]:
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            statuses[ended[0]] = ended[1]
    return statuses


def _launch(
    main: Callable[[], int], guard_pid: int, watch: "_GuardWatch", stop_signals: set[signal.Signals]
) -> NoReturn:
    status = 1
    try:
        die_with_parent(signal.SIGTERM)
        become_subreaper()
        if os.getppid() == guard_pid:

            def watched() -> int:
                _set_handlers(stop_signals)
                threading.Thread(target=watch.run, name="guard-watch", daemon=True).start()
                return main()

            status = _status_of(watched)
    finally:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:
            try:
                end_descendants(_SWEEP_GRACE_S)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                # The caller's frames are the guard's to finish.
                os._exit(status & 0xFF)


def _status_of(main: Callable[[], int]) -> int:
    try:
        return main()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def _set_handlers(stop_signals: set[signal.Signals]) -> None:
    """Makes SIGTERM the launcher's only stop signal.

    The launcher shares the guard's process group, for reading the terminal and for Ctrl-Z. So Ctrl-C reaches both, and
    only the guard acts on it. The handler is empty: child programs would inherit SIG_IGN. Ray's own processes block
    SIGINT.
    """
    stopping = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise SystemExit(exit_codes.SIGNALLED + signum)

    def nothing(signum: int, frame: FrameType | None) -> None:
        pass

    signal.signal(signal.SIGTERM, stop)
    for signum in stop_signals & {signal.SIGINT, signal.SIGHUP}:
        signal.signal(signum, nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals | {signal.SIGCHLD, signal.SIGINT, signal.SIGHUP})


class _GuardWatch(NamedTuple):
    """The launcher's view of the guard."""

    guard_fd: int
    stop_fd: int
    hangup_fd: int
    orphan_grace_s: float

    def run(self) -> NoReturn:
        """Stops `main` when the guard asks, passes SIGHUP on, and ends the process after the guard's death.

        Python runs handlers on the main thread, which a signal to the process could leave asleep.
        """
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        asked = {self.stop_fd: signal.SIGTERM, self.hangup_fd: signal.SIGHUP}
        poll = select.poll()
        for fd in (self.guard_fd, *asked):
            poll.register(fd, select.POLLIN)
        while self.guard_fd not in (ready := {fd for fd, _ in poll.poll(_IDLE_WAIT_S * 1000)}):
            for fd in ready:
                os.eventfd_read(fd)
                signal.pthread_kill(main_thread, asked[fd])
        time.sleep(self.orphan_grace_s)
        end_descendants(0.0)
        os._exit(exit_codes.SIGNALLED + signal.SIGTERM)
