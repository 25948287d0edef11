"""Two processes that see to it that nothing a command started outlives the command.

The guard is the command's own process: it waits, passes stop signals on and sweeps up. The launcher is its
child and does the work. Each outlives the other's sudden death long enough to end all that was started:
both are subreapers, so a descendant whose parent ended comes to them, whatever it did to its session.
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
from typing import NoReturn

from tandem import exit_codes
from tandem.deploy.host.process_tree import become_subreaper, die_with_parent, end_descendants

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

# Descendants get this much between SIGTERM and SIGKILL, once the launcher has ended or given up.
_SWEEP_GRACE_S = 2.0
# Without a guard the launcher is its own last resort, and all must be gone 10 s after the guard.
_ORPHAN_GRACE_S = 5.0
# Wrappers such as `uv run` pass on a Ctrl-C that the terminal already sent to everyone: that is one stop, not two.
_SAME_STOP_S = 0.5
_KILL_WAIT_S = 5.0
# It is the si_code of signals that the terminal's keys make (SI_KERNEL).
_SENT_BY_KERNEL = 0x80
_IDLE_WAIT_S = 60.0


def run_guarded(main: Callable[[], int], *, stop_grace_s: float = 20.0) -> int:
    """Runs `main` in a child process and returns its status once nothing it started is left.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP all reach `main` as SIGTERM, which raises SystemExit there until
    `main` sets a handler of its own; ray.init() sets one too, so `main` sets its own after that. SIGTERM may
    come more than once (a service manager signals every process): only the first should count. After
    `stop_grace_s`, on a second Ctrl-C or on SIGQUIT, the child is killed. If this process is killed, `main`
    gets SIGTERM and a few seconds. `main` stops what it started: exit functions (atexit) do not run, and what
    is left is ended.

    The calling process must have one thread and no children. The status of a child that a signal killed is
    128 + signal.
    """
    if threading.active_count() > 1:
        # Only the forking thread survives in the child; and the child is told of that thread's death.
        raise RuntimeError("run_guarded() needs a process with a single thread")
    become_subreaper()
    # A signal that was ignored from the start (nohup, a script's background job) stays ignored.
    ignored = {s for s in _STOP_SIGNALS if signal.getsignal(s) is signal.SIG_IGN}
    stop_signals = set(_STOP_SIGNALS) - ignored | {signal.SIGTERM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A shell has a script's background jobs ignore SIGINT for the sake of the terminal's Ctrl-C, which is meant for
    # the foreground; whoever sends one by `kill -INT` means this very process. The kernel keeps even an ignored signal
    # for a process that blocks it.
    waited_for = stop_signals | {signal.SIGCHLD, signal.SIGINT}
    # Blocked signals queue up until waited for, so none can slip in between a check and a wait.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        guard_pid = os.getpid()
        # It is opened here for the launcher to inherit: there it could already be too late.
        guard_fd = os.pidfd_open(guard_pid)
        stop_fd = os.eventfd(0)
        launcher_pid = os.fork()
        if launcher_pid == 0:
            _launch(main, guard_pid, guard_fd, stop_fd, stop_signals, min(stop_grace_s, _ORPHAN_GRACE_S))
        os.close(guard_fd)
        status = _watch(launcher_pid, stop_fd, waited_for, signal.SIGINT in ignored, stop_grace_s)
        os.close(stop_fd)
        end_descendants(_SWEEP_GRACE_S)
        _reap()
        return status
    finally:
        # A further Ctrl-C while stopping asked for no more than what has been done.
        while signal.sigtimedwait(waited_for, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _watch(
    launcher_pid: int, stop_fd: int, waited_for: set[signal.Signals], in_background: bool, stop_grace_s: float
) -> int:
    """The guard's part: passes on stop signals, through `stop_fd`, until the launcher has ended; returns its status.

    Args:
        in_background: a Ctrl-C of the terminal is meant for others.
    """
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
                # The launcher is stuck in the kernel: waiting longer would change nothing.
                return exit_codes.SIGNALLED + signal.SIGKILL
            os.kill(launcher_pid, signal.SIGKILL)
            killed = True
            deadline = now + _KILL_WAIT_S
        received = signal.sigtimedwait(waited_for, min(_IDLE_WAIT_S, max(0.0, deadline - now)))
        if received is None or received.si_signo == signal.SIGCHLD or killed:
            continue
        if in_background and received.si_signo == signal.SIGINT and received.si_code == _SENT_BY_KERNEL:
            continue
        now = time.monotonic()
        if received.si_signo == signal.SIGQUIT or (asked_at is not None and now - asked_at > _SAME_STOP_S):
            deadline = now
        elif asked_at is None:
            os.eventfd_write(stop_fd, 1)
            asked_at = now
            deadline = now + stop_grace_s


def _reap() -> dict[int, int]:
    """Takes leave of every child that has ended, adopted ones too; returns wait statuses by pid."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            statuses[ended[0]] = ended[1]
    return statuses


def _launch(
    main: Callable[[], int],
    guard_pid: int,
    guard_fd: int,
    stop_fd: int,
    stop_signals: set[signal.Signals],
    orphan_grace_s: float,
) -> NoReturn:
    """The launcher's part, from fork to exit."""
    status = 1
    try:
        # The signal comes at the death of the thread that forked: the guard has only the one.
        die_with_parent(signal.SIGTERM)
        become_subreaper()
        if os.getppid() == guard_pid:
            watch = (guard_fd, stop_fd, orphan_grace_s)

            def watched() -> int:
                # From here on a stop may come at any moment.
                _set_handlers(stop_signals)
                threading.Thread(target=_obey_and_outlive, args=watch, name="guard-watch", daemon=True).start()
                return main()

            status = _status_of(watched)
    finally:
        try:
            # The guard's death, or a hasty user, must not interrupt the sweep.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:
            try:
                end_descendants(_SWEEP_GRACE_S)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                # The launcher never returns into the caller's frames, which are the guard's to finish.
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
    """Makes SIGTERM the one stop signal of the launcher, whose copy of a Ctrl-C does nothing.

    The launcher stays in the guard's process group: in a group of its own it would be in the background,
    stopped as soon as it reads the terminal, and Ctrl-Z would stop the guard alone. So the terminal's
    Ctrl-C reaches both, and only the guard's counts. The handler is an empty one and not SIG_IGN, because
    programs started from here would inherit that. (Ray's own processes block SIGINT.)
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals | {signal.SIGCHLD, signal.SIGINT})


def _obey_and_outlive(guard_fd: int, stop_fd: int, grace_s: float) -> None:
    """The launcher's watch over the guard: stops `main` when the guard says so and, once the guard is dead, ends this
    process too, whatever `main` does.

    Python runs handlers in the main thread, so that is the thread to signal. Had the guard signalled the process, any
    thread could take it: the kernel passes over a main thread that has yet to wake for the same Ctrl-C's SIGINT. It
    would sleep on after that, and no handler would run before its wait is over.
    """
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    poll = select.poll()
    poll.register(guard_fd, select.POLLIN)
    poll.register(stop_fd, select.POLLIN)
    while guard_fd not in (ready := {fd for fd, _ in poll.poll(_IDLE_WAIT_S * 1000)}):
        if stop_fd in ready:
            os.eventfd_read(stop_fd)
            signal.pthread_kill(main_thread, signal.SIGTERM)
    time.sleep(grace_s)
    end_descendants(0.0)
    os._exit(exit_codes.SIGNALLED + signal.SIGTERM)
