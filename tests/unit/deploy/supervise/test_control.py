"""Questions over a cluster's control socket."""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.supervise import control
from tandem.deploy.supervise.control import ControlServer, ask


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.sock"


@pytest.fixture
def server(path: Path) -> Iterator[ControlServer]:
    def answer(asked: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield {"asked": asked}
        yield {"last": True}

    server = ControlServer(path, answer)
    yield server
    server.close()


def test_an_answer_comes_line_by_line_as_often_as_it_is_asked_for(server: ControlServer, path: Path) -> None:
    for number in range(3):
        assert list(ask(path, {"number": number})) == [{"asked": {"number": number}}, {"last": True}]


def test_nobody_else_can_open_it(server: ControlServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # The caller looks like another user.
    uid = os.getuid()
    monkeypatch.setattr(control.os, "getuid", lambda: uid + 1)
    with contextlib.suppress(ConnectionError):
        assert list(ask(path, {})) == []


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\n", b"\xff\n"])
def test_nonsense_is_refused_and_the_next_one_is_heard(server: ControlServer, path: Path, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(line)
        assert b"not a question" in connection.makefile("rb").read()
    assert list(ask(path, {})) == [{"asked": {}}, {"last": True}]


def test_who_leaves_or_is_slow_keeps_nobody_from_an_answer(server: ControlServer, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
        assert list(ask(path, {})) == [{"asked": {}}, {"last": True}]


def test_nothing_is_left_of_it(path: Path) -> None:
    num_threads = threading.active_count()
    ControlServer(path, lambda asked: iter(())).close()
    assert not path.exists() and threading.active_count() == num_threads
    with pytest.raises(OSError, match="No such file"):
        next(ask(path, {}))
