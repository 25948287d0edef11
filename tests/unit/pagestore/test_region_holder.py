"""The holder and its clients, over real sockets and processes."""

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import exit_watch
from tandem.pagestore import region_holder
from tandem.pagestore.region import GIB, Region
from tandem.pagestore.region_client import give_back_region, take_region
from tandem.pagestore.region_holder import TAKE, RegionHolder
from tandem.processes import ProcessId

TOKEN = "the cluster's token"
OTHER_USER = """
import sys, pathlib
from tandem.pagestore.region_client import take_region
taken = take_region(pathlib.Path(sys.argv[1]), sys.argv[2])
taken.region.map()[:4] = b"mark"
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    holder = RegionHolder(tmp_path / "region", TOKEN, Region.create(mmap.PAGESIZE, GIB))
    yield tmp_path / "region"
    holder.close()
    assert not (tmp_path / "region").exists()


@pytest.fixture
def other(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has taken the region."""
    command = [sys.executable, "-c", OTHER_USER, str(path), TOKEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "has it\n"
        yield process
        process.kill()


def test_a_later_process_gets_the_same_memory_and_the_names_of_others(
    path: Path, other: "subprocess.Popen[str]"
) -> None:
    taken = take_region(path, TOKEN)
    assert taken.users == (ProcessId.of(other.pid),)
    assert taken.region.map()[:4] == b"mark"
    # The caller itself is not one of the others.
    assert take_region(path, TOKEN).users == taken.users


def test_a_process_is_forgotten_once_it_is_gone_for_the_settle_time(path: Path, other: "subprocess.Popen[str]") -> None:
    user = ProcessId.of(other.pid)
    other.kill()
    other.wait()
    assert take_region(path, TOKEN).users == (user,)
    time.sleep(exit_watch.SETTLE_S + 0.05)
    assert take_region(path, TOKEN).users == ()


def test_a_process_that_gave_the_region_back_is_no_user(path: Path) -> None:
    take_region(path, TOKEN)
    script = "import sys, pathlib\nfrom tandem.pagestore.region_client import take_region\n"
    script += "print(take_region(pathlib.Path(sys.argv[1]), sys.argv[2]).users)"

    def users() -> str:
        return subprocess.run([sys.executable, "-c", script, str(path), TOKEN], capture_output=True, text=True).stdout

    assert str(ProcessId.of(os.getpid())) in users()
    give_back_region(path, TOKEN)
    assert str(ProcessId.of(os.getpid())) not in users()


def test_only_the_token_opens(path: Path) -> None:
    for token in ("", "another", "ä"):
        with pytest.raises(PermissionError, match="the cluster token is wrong"):
            take_region(path, token)
    assert path.stat().st_mode & 0o777 == 0o600
    take_region(path, TOKEN)


@pytest.mark.parametrize("packet", [b"", b"\xff", b"null", b"[]", b'{"token": "\\ud800", "do": "take"}', b"[" * 60000])
def test_a_caller_that_sends_nonsense_gets_nothing_and_ends_nothing(path: Path, packet: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect(str(path))
        caller.send(packet)
        assert caller.recv(1) == b""
    take_region(path, TOKEN)


@pytest.mark.parametrize("packet", [b"", b"\xff", b"[]", b"{}", b'{"token": 1}', b"9" * 70000])
def test_nonsense_gets_no_descriptor_and_harms_nobody(packet: bytes, path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.settimeout(10.0)
        caller.connect(str(path))
        caller.send(packet)
        answer, fds, _, _ = socket.recv_fds(caller, 1024, 1)
        assert (answer, fds) == (b"", [])
    take_region(path, TOKEN)


def test_an_unknown_request_gets_no_descriptor(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect(str(path))
        caller.send(json.dumps({"token": TOKEN, "do": f"{TAKE}n"}).encode())
        assert socket.recv_fds(caller, 1024, 1)[:2] == (b"", [])


def test_a_silent_caller_delays_others_only_for_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_holder, "CALLER_TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(path))
        began = time.monotonic()
        take_region(path, TOKEN)
        assert time.monotonic() - began < 5.0


def test_many_callers_wait_their_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_holder, "CALLER_TIMEOUT_S", 0.01)
    callers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]
    for caller in callers:
        caller.connect(str(path))
    take_region(path, TOKEN)
    for caller in callers:
        caller.close()


def test_a_holder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        take_region(tmp_path / "none", TOKEN)
