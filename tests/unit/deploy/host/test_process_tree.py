"""Process trees of plain subprocesses, and records of killed runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.deploy.host.process_tree import descendants, end_processes, send_signal
from tandem.deploy.host.run_record import (
    RunAbout,
    RunOwner,
    default_directory,
    end_leftovers,
    find_runs,
    remove_record,
    write_record,
)
from tandem.processes import ProcessId, read_stat

SLEEP = "import time; time.sleep(60)"

# A subreaper with a child, a grandchild in its own session, and a twice-forked orphan.
TREE = f"""
import subprocess, sys, time
from tandem.deploy.host.process_tree import descendants
from tandem.prctl import become_subreaper
become_subreaper()
sleep = [sys.executable, "-c", {SLEEP!r}]
spawn = f"import subprocess, time; subprocess.Popen({{sleep!r}}, start_new_session=True); "
subprocess.Popen([sys.executable, "-c", spawn + "time.sleep(60)"])
subprocess.run([sys.executable, "-c", spawn])
while len(descendants()) < 3:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(60)
"""

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""

NEGLECTFUL = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def running(script: str) -> Iterator[ProcessId]:
    """Runs a script in a subprocess; enters once it printed "ready"."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "ready\n"
        yield ProcessId.of(process.pid)
    finally:
        for child in descendants(process.pid):
            send_signal(child, signal.SIGKILL)
        process.kill()
        process.wait(10)


def test_descendants_found_across_sessions_and_double_forks() -> None:
    with running(TREE) as root:
        found = descendants(root.pid)
        assert len(found) == 3
        assert root not in found
        assert all(process.is_alive() for process in found)
        assert {root, *found} <= set(descendants())
        assert end_processes([root, *found], 5.0) == []
        assert not any(process.is_alive() for process in [root, *found])


def test_ended_child_is_reaped() -> None:
    with running("print('ready', flush=True); " + SLEEP) as process:
        began = time.monotonic()
        assert end_processes([process], 5.0) == []
        assert time.monotonic() - began < 2.0
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def test_zombie_of_another_parent_counts_as_ended() -> None:
    """Where init does not reap, as in many containers, such a zombie stays."""
    with running(NEGLECTFUL) as parent:
        (child,) = descendants(parent.pid)
        began = time.monotonic()
        assert end_processes([child], 5.0) == []
        assert time.monotonic() - began < 2.0
        assert read_stat(child.pid) is not None and descendants(parent.pid) == []


def test_process_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    with running(STUBBORN) as process:
        began = time.monotonic()
        assert end_processes([process], 0.3) == []
        assert 0.3 <= time.monotonic() - began < 2.0
        assert not process.is_alive()


def test_stopped_process_is_killed() -> None:
    with running("print('ready', flush=True); " + SLEEP) as process:
        send_signal(process, signal.SIGSTOP)
        assert end_processes([process], 0.1) == []


def test_reused_pid_is_left_alone() -> None:
    with running("print('ready', flush=True); " + SLEEP) as process:
        earlier = ProcessId(process.pid, process.start_time - 1)
        assert not earlier.is_alive()
        assert end_processes([earlier], 0.2) == []
        send_signal(earlier, signal.SIGKILL)
        time.sleep(0.1)
        assert process.is_alive()


def test_no_such_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    gone = ProcessId.of(child.pid)
    child.wait(10)
    assert not gone.is_alive()
    assert end_processes([gone], 0.2) == []
    with pytest.raises(ProcessLookupError):
        ProcessId.of(child.pid)


def owner_gone() -> RunOwner:
    return RunOwner(guard=ProcessId(os.getpid(), 1), launcher=ProcessId(os.getppid(), 1))


def test_leftovers_of_a_dead_run_are_ended(tmp_path: Path) -> None:
    directory = tmp_path / "tandem"
    assert end_leftovers(directory) == []
    with running(TREE) as root:
        # The record lists the root only; its descendants are found.
        path = write_record(directory, owner_gone(), [root, ProcessId(os.getpid(), 1)])
        assert directory.stat().st_mode & 0o777 == 0o700
        tree = {root, *descendants(root.pid)}
        assert set(end_leftovers(directory)) == tree
        assert not any(process.is_alive() for process in tree)
        assert not path.exists()
    assert end_leftovers(directory) == []


def test_run_with_a_living_owner_is_left_alone(tmp_path: Path) -> None:
    gone = owner_gone()
    me = ProcessId.of(os.getpid())
    with running("print('ready', flush=True); " + SLEEP) as process:
        for owner in (RunOwner(me, gone.launcher), RunOwner(gone.guard, me)):
            path = write_record(tmp_path, owner, [process])
            assert end_leftovers(tmp_path) == []
            assert path.exists()
            remove_record(tmp_path, owner)
            remove_record(tmp_path, owner)
        assert process.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_foreign_and_corrupt_records_end_nothing(tmp_path: Path) -> None:
    with running("print('ready', flush=True); " + SLEEP) as process:
        path = write_record(tmp_path, owner_gone(), [process])
        record = json.loads(path.read_text())
        boot, namespace = record["machine"]
        (tmp_path / "boot.json").write_text(json.dumps(record | {"machine": ["other", namespace]}))
        path.write_text(json.dumps(record | {"machine": [boot, "pid:[1]"]}))
        corrupt = ["", "[]", "{}", "\0", json.dumps(record | {"processes": [["a", "b"]]})]
        for number, text in enumerate(corrupt):
            (tmp_path / f"corrupt{number}.json").write_text(text)
        assert end_leftovers(tmp_path) == []
        assert process.is_alive()
        assert list(tmp_path.iterdir()) == [path]


def test_records_of_another_format_are_told_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running("print('ready', flush=True); " + SLEEP) as process:
        path = write_record(tmp_path, RunOwner(process, process), [process], RunAbout("chat"))
        files = [path, path.with_suffix(".token"), path.with_suffix(".sock")]
        for file in files[1:]:
            file.touch()
        [run] = find_runs(tmp_path)
        assert run.about.name == "chat" and not caplog.records
        # The owner is elsewhere in it, so that it would pass for a corrupt one.
        path.write_text(json.dumps({"format": 2, "owners": [[process.pid, process.start_time]]}))
        for look in (find_runs, end_leftovers):
            caplog.clear()
            assert look(tmp_path) == []
            assert caplog.messages[0].startswith(f"{path} is of another version of tandem: its format is 2, not 1; use")
        assert process.is_alive() and all(file.exists() for file in files)


def test_records_without_a_format_are_of_the_first(tmp_path: Path) -> None:
    with running("print('ready', flush=True); " + SLEEP) as process:
        path = write_record(tmp_path, RunOwner(process, process), [process], RunAbout("chat"))
        record = json.loads(path.read_text())
        assert record.pop("format") == 1
        path.write_text(json.dumps(record))
        assert len(find_runs(tmp_path)) == 1


def test_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError):
        write_record(tmp_path, owner_gone(), [])
    with pytest.raises(PermissionError):
        end_leftovers(tmp_path)
    link = tmp_path / "link"
    tmp_path.chmod(0o700)
    link.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        end_leftovers(link)


def test_default_directory_is_the_same_in_every_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = default_directory()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert default_directory() == here
    assert here.name == f"tandem-{os.getuid()}"
