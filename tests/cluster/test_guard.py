"""No process outlives a guarded command, with a real Ray and without."""

import itertools
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.deploy.host.run_record import end_leftovers
from tandem.processes import ProcessId

# Below the default grace, and every sleep of the commands.
ALL_GONE_S = 15.0

RAY = """
import os, signal, sys, threading
from pathlib import Path
from tandem.deploy.host.guard import run_guarded
from tandem.deploy.host.process_tree import descendants
from tandem.deploy.host.run_record import RunOwner, remove_record, write_record

def main():
    answer = input() if os.isatty(0) else ""
    import ray
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20,
             log_to_driver=False)
    class Actor:
        def answer(self):
            return os.getpid()
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    ray.get(actor.answer.remote())
    stops = []
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: (stops.append(1), stop.set()))
    owner = RunOwner.of_launcher()
    write_record(Path(sys.argv[1]), owner, descendants())
    print("ready", answer, flush=True)
    stop.wait(60)
    ray.shutdown()
    remove_record(Path(sys.argv[1]), owner)
    print("stopped after", len(stops), flush=True)
    return 7

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run_guarded(main))
"""

# A run of one process besides the launcher.
RECORDED = """
import signal, subprocess, sys, time
from pathlib import Path
from tandem.deploy.host.guard import run_guarded
from tandem.deploy.host.process_tree import descendants
from tandem.deploy.host.run_record import RunOwner, write_record

def main():
    subprocess.Popen(["sleep", "60"])
    write_record(Path(sys.argv[1]), RunOwner.of_launcher(), descendants())
    print("ready ", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run_guarded(main))
"""
# Ray may end all of its own processes; the other one stays.
RAY_AND_ANOTHER = RAY.replace("import ray\n", "import ray, subprocess\n    subprocess.Popen(['sleep', '60'])\n")

# Starts a process that ignores SIGTERM and left the session, then runs the test's action.
PLAIN = """
import os, signal, subprocess, sys, time
from tandem.deploy.host.guard import run_guarded

stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"

def main():
    child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    {setup}
    print("ready ", flush=True)
    {action}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run_guarded(main, stop_grace_s={grace}))
"""
STUCK = "[signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]"


@dataclass
class Command:
    process: subprocess.Popen[str]
    guard: ProcessId
    launcher: ProcessId
    tree: list[ProcessId]
    terminal: int | None

    def hang_up(self) -> None:
        assert self.terminal is not None
        os.close(self.terminal)
        self.terminal = None

    def left(self) -> list[ProcessId]:
        """Return living processes: the first ones, and later ones of the session."""
        return [process for process in {*self.tree, *_session(self.process.pid)} if process.is_alive()]

    def wait_until_gone(self, within_s: float = ALL_GONE_S) -> float:
        """Return the seconds this took."""
        began = time.monotonic()
        while left := self.left():
            assert time.monotonic() - began < within_s, left
            time.sleep(0.05)
        return time.monotonic() - began

    def finish(self) -> tuple[int, str]:
        """Return the exit status and the later output."""
        assert self.process.stdout is not None
        return self.process.wait(ALL_GONE_S), self.process.stdout.read().strip()


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    at_end = ExitStack()
    scripts = itertools.count()

    def started(script: str, *, terminal: bool = False) -> Command:
        path = tmp_path / f"command{next(scripts)}.py"
        path.write_text(script)
        keyboard, screen = pty.openpty() if terminal else (None, None)
        # Ctrl-C in a terminal of its own reaches this command alone.
        stdin = "/dev/null" if screen is None else os.ttyname(screen)
        process = subprocess.Popen(
            ["sh", "-c", 'exec <"$0"; exec "$@"', stdin, sys.executable, str(path), str(tmp_path / "runs")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path.cwd())},
        )
        at_end.callback(_end, process)
        if keyboard is not None and screen is not None:
            os.close(screen)
            os.write(keyboard, b"hello\n")
        assert process.stdout is not None
        assert process.stdout.readline() == ("ready hello\n" if terminal else "ready \n")
        guard = ProcessId.of(process.pid)
        tree = descendants(guard.pid)
        command = Command(process, guard, tree[0], [guard, *tree], keyboard)
        if keyboard is not None:
            at_end.callback(lambda: command.hang_up() if command.terminal is not None else None)
        return command

    with at_end:
        yield started


def _end(process: subprocess.Popen[str]) -> None:
    end_processes({*descendants(process.pid), *_session(process.pid)}, 0.0)
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def _session(session: int) -> list[ProcessId]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(ProcessLookupError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                found.append(ProcessId.of(int(entry.name)))
    return found


def plain(action: str, *, setup: str = "pass", grace: float = 20.0) -> str:
    return PLAIN.format(action=action, setup=setup, grace=grace)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_ray_gracefully(start: Start, tmp_path: Path) -> None:
    command = start(RAY, terminal=True)
    assert len(command.tree) > 6
    assert command.terminal is not None
    os.write(command.terminal, b"\x03")
    print("gone after", command.wait_until_gone())
    assert command.finish() == (7, "stopped after 1")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_sigterm_or_killed_guard_or_launcher_leaves_no_process(start: Start) -> None:
    # In parallel: Ray's start is mostly waiting.
    with ThreadPoolExecutor(3) as pool:
        stopped, guardless, orphaned = pool.map(start, [RAY] * 3)
    os.kill(stopped.guard.pid, signal.SIGTERM)
    print("gone after", stopped.wait_until_gone())
    assert stopped.finish() == (7, "stopped after 1")

    os.kill(guardless.guard.pid, signal.SIGKILL)
    print("gone after", guardless.wait_until_gone())
    assert guardless.finish() == (-signal.SIGKILL, "stopped after 1")

    os.kill(orphaned.launcher.pid, signal.SIGKILL)
    print("gone after", orphaned.wait_until_gone())
    assert orphaned.finish() == (128 + signal.SIGKILL, "")


@pytest.mark.parametrize(
    "script", [pytest.param(RECORDED, id="plain"), pytest.param(RAY_AND_ANOTHER, id="ray", marks=pytest.mark.slow)]
)
def test_next_start_ends_leftovers_of_killed_processes(start: Start, tmp_path: Path, script: str) -> None:
    command = start(script)
    assert end_leftovers(tmp_path / "runs") == []
    began = time.monotonic()
    killed = (command.guard, command.launcher)
    # Neither may see the other's death and end the rest.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in killed:
            os.kill(process.pid, number)
    while (any(p.is_alive() for p in killed) or len(command.left()) > 2) and time.monotonic() - began < 4.0:
        time.sleep(0.1)
    assert end_leftovers(tmp_path / "runs")
    command.wait_until_gone(ALL_GONE_S - (time.monotonic() - began))
    print("gone after", time.monotonic() - began)
    assert list((tmp_path / "runs").iterdir()) == []


def test_status_of_main_is_returned_and_leftovers_end(start: Start, tmp_path: Path) -> None:
    wait = "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n    "
    statuses = {"return 3": 3, "sys.exit(4)": 4, "raise ValueError": 1, "os.kill(os.getpid(), 9)": 137}
    commands = [start(plain(wait + action)) for action in statuses]
    (tmp_path / "runs").mkdir()
    for command, status in zip(commands, statuses.values(), strict=True):
        command.wait_until_gone()
        assert command.finish() == (status, "")


def test_stuck_main_is_killed_after_the_grace_or_at_once(start: Start) -> None:
    stopped, quit_ = (start(plain("time.sleep(60)", setup=STUCK, grace=grace)) for grace in (0.5, 60.0))
    os.kill(stopped.guard.pid, signal.SIGTERM)
    os.kill(quit_.guard.pid, signal.SIGQUIT)
    for command in (stopped, quit_):
        command.wait_until_gone()
        assert command.finish() == (128 + signal.SIGKILL, "")


LOOKS = "signal.signal(signal.SIGHUP, lambda *_: print('looks', flush=True))"


@pytest.mark.parametrize("has_terminal", [False, True])
def test_hangup_stops_only_a_command_that_lost_its_terminal(start: Start, has_terminal: bool) -> None:
    script = plain("time.sleep(60)", setup=LOOKS)
    if has_terminal:
        script = script.replace("ready ", "ready hello")
    command = start(script, terminal=has_terminal)
    assert command.process.stdout is not None
    for _ in range(2):
        os.kill(command.guard.pid, signal.SIGHUP)
        assert command.process.stdout.readline() == "looks\n"
    if has_terminal:
        command.hang_up()
        # A shell sends it to its jobs.
        os.kill(command.guard.pid, signal.SIGHUP)
    else:
        os.kill(command.guard.pid, signal.SIGTERM)
    command.wait_until_gone()
    status, _ = command.finish()
    assert status == 128 + signal.SIGTERM


def test_stuck_launcher_ends_with_killed_guard_or_second_ctrl_c(start: Start) -> None:
    guardless, command = (start(plain("time.sleep(60)", setup=STUCK)) for _ in range(2))
    os.kill(guardless.guard.pid, signal.SIGKILL)
    # Two quick Ctrl-Cs count as one.
    for _ in range(2):
        os.killpg(command.guard.pid, signal.SIGINT)
    time.sleep(1.0)
    assert command.launcher.is_alive()
    os.killpg(command.guard.pid, signal.SIGINT)
    command.wait_until_gone()
    assert command.finish() == (128 + signal.SIGKILL, "")
    guardless.wait_until_gone()


def test_stop_goes_to_the_main_thread(start: Start) -> None:
    # In another thread the signal would not wake the main thread.
    wait = "while signal.SIGTERM not in signal.sigpending(): time.sleep(0.05)\n    "
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    command = start(plain(wait + "return signal.sigwait([signal.SIGTERM])", setup=block))
    os.killpg(command.guard.pid, signal.SIGINT)
    command.wait_until_gone()
    assert command.finish() == (signal.SIGTERM, "")


def test_stop_before_main(start: Start, tmp_path: Path) -> None:
    # The guard watch may receive the stop while its thread is starting.
    hasty = """
import threading

class Hasty(threading.Thread):
    def start(self):
        super().start()
        print("ready ", flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

threading.Thread = Hasty
"""
    script = plain("time.sleep(60)").replace("if __name__", hasty + "\nif __name__")
    command = start(script)
    (tmp_path / "runs").mkdir()
    command.wait_until_gone()
    assert command.finish() == (128 + signal.SIGTERM, "")


def test_background_command_ignores_only_terminal_ctrl_c(start: Start) -> None:
    # A shell starts `&` commands with SIGINT ignored.
    script = plain("input(); time.sleep(60)").replace("signal.default_int_handler", "signal.SIG_IGN")
    command = start(script.replace("ready ", "ready hello"), terminal=True)
    assert command.terminal is not None
    os.write(command.terminal, b"\x03")
    time.sleep(0.5)
    assert command.launcher.is_alive()
    os.kill(command.guard.pid, signal.SIGINT)
    command.wait_until_gone()
    assert command.finish() == (128 + signal.SIGTERM, "")


def test_ignored_hangup_stays_ignored(start: Start) -> None:
    command = start("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + plain("time.sleep(60)"))
    os.killpg(command.guard.pid, signal.SIGHUP)
    time.sleep(0.5)
    assert command.launcher.is_alive()
    os.kill(command.guard.pid, signal.SIGHUP)
    os.kill(command.guard.pid, signal.SIGTERM)
    command.wait_until_gone()
    assert command.finish() == (128 + signal.SIGTERM, "")
