"""Folders of ended sessions go, but the newest; whatever may be in use, or another program's, stays."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tandem.deploy.on_ray import session_folders
from tandem.deploy.on_ray.session_folders import (
    MARK,
    NUM_KEPT_PROCESSES,
    UNMARKED_AGE_S,
    mark_session,
    remove_ended_sessions,
    remove_old_logs,
)

# No process has it.
DEAD_PID = 2**22 - 1


def make_session(directory: Path, day: int, *, age_s: float = 0.0) -> Path:
    session = directory / f"session_2026-01-{day:02}_00-00-00_000000_{DEAD_PID}"
    (session / "logs").mkdir(parents=True)
    (session / "sockets").mkdir()
    made = time.time() - age_s
    os.utime(session, (made, made))
    return session


def left(directory: Path) -> list[int]:
    return sorted(int(path.name[16:18]) for path in directory.iterdir() if path.name.startswith("session_2"))


def test_ended_sessions_go_but_the_newest(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        mark_session(make_session(tmp_path, day)).close()
    remove_ended_sessions(tmp_path, are_all_ours=False)
    assert left(tmp_path) == [3]


def test_a_session_in_use_stays() -> None:
    # Paths of sockets are short.
    with TemporaryDirectory() as path:
        directory = Path(path)
        with mark_session(make_session(directory, 1)), socket.socket(socket.AF_UNIX) as raylet:
            # A killed launcher's Ray still runs.
            mark_session(killed := make_session(directory, 2)).close()
            raylet.bind(str(killed / "sockets/raylet"))
            raylet.listen()
            for day in (3, 4):
                mark_session(make_session(directory, day)).close()
            remove_ended_sessions(directory, are_all_ours=True)
            assert left(directory) == [1, 2, 4]
        remove_ended_sessions(directory, are_all_ours=True)
        assert left(directory) == [4]


@pytest.mark.parametrize(("are_all_ours", "days"), [(True, [3, 4]), (False, [1, 2, 3, 4])])
def test_a_folder_without_a_mark_goes_when_old_and_surely_ours(
    tmp_path: Path, are_all_ours: bool, days: Sequence[int]
) -> None:
    for day in (1, 2):
        make_session(tmp_path, day, age_s=2 * UNMARKED_AGE_S)
    # A start that goes on.
    make_session(tmp_path, 3)
    mark_session(make_session(tmp_path, 4)).close()
    remove_ended_sessions(tmp_path, are_all_ours=are_all_ours)
    assert left(tmp_path) == days


def test_links_and_other_files_stay(tmp_path: Path) -> None:
    sessions, elsewhere = tmp_path / "ray", tmp_path / "elsewhere"
    mark_session(make_session(elsewhere, 1)).close()
    mark_session(make_session(sessions, 2)).close()
    (sessions / "session_2026-01-01_00-00-00_000000_1").symlink_to(next(elsewhere.iterdir()))
    (sessions / "session_latest").symlink_to(next(elsewhere.iterdir()))
    (sessions / "notes").mkdir()
    remove_ended_sessions(sessions, are_all_ours=True)
    assert left(elsewhere) == [1] and left(sessions) == [1, 2] and (sessions / "notes").is_dir()
    remove_ended_sessions(tmp_path / "none", are_all_ours=True)


def test_the_mark_is_released_with_its_process(tmp_path: Path) -> None:
    session = make_session(tmp_path, 1)
    pid = os.fork()
    if pid == 0:
        mark_session(session)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (session / MARK).exists()
    for day in (2, 3):
        mark_session(make_session(tmp_path, day)).close()
    remove_ended_sessions(tmp_path, are_all_ours=False)
    assert left(tmp_path) == [3]


def test_only_the_last_ended_processes_keep_their_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = {5, 6}
    monkeypatch.setattr(session_folders, "read_stat", lambda pid: pid if pid in alive else None)
    (tmp_path / "events").mkdir()
    of_ray = ["gcs_server.out", "raylet.out", "events/event_GCS.log", "python-core-driver-01000000ff_9.log"]
    for name in of_ray:
        (tmp_path / name).touch()
    num_processes = NUM_KEPT_PROCESSES + 10
    for pid in range(1, num_processes + 1):
        for name in (
            f"worker-0a1b-01000000-{pid}.err",
            f"worker-0a1b-01000000-{pid}.err.1",
            f"worker-0a1b-ffffffff-{pid}.out",
            f"python-core-worker-0a1b_{pid}.log",
            f"events/event_CORE_WORKER_{pid}.log",
        ):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (1000 + pid, 1000 + pid))
    remove_old_logs(tmp_path)
    pids = {int(path.name.split(".")[0].split("-")[-1].split("_")[-1]) for path in tmp_path.glob("*worker*")}
    newest = set(range(num_processes - NUM_KEPT_PROCESSES + 1, num_processes + 1))
    assert pids == newest | alive
    assert len(list(tmp_path.glob("events/*WORKER*"))) == len(pids)
    assert all((tmp_path / name).exists() for name in of_ray)
