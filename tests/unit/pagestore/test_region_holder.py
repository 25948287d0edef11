"""The holder and its clients, over real sockets and processes."""

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem import exit_watch
from tandem.pagestore import region_holder
from tandem.pagestore.region import GIB, Region
from tandem.pagestore.region_client import TakenRegion, begin_use, take_region
from tandem.pagestore.region_holder import BEGIN, MAP, SERVE, RegionHolder
from tandem.processes import ProcessId

TOKEN = "the cluster's token"
# Arguments: path, token, and what it is: "mapper", "user" or "store".
OTHER_PROCESS = """
import itertools, pathlib, sys
from tandem.pagestore.region_client import begin_use, take_region
path, token, kind = pathlib.Path(sys.argv[1]), *sys.argv[2:]
taken = take_region(path, token, as_store=kind == "store")
taken.region.map()[:4] = b"mark"
print("has it", flush=True)
for line in itertools.chain([kind], sys.stdin):
    if line.strip() == "user":
        begin_use(path, token, taken.region_id)
        print("has begun", flush=True)
"""


@contextmanager
def other_process(path: Path, kind: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", OTHER_PROCESS, str(path), TOKEN, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "has it\n"
        if kind == "user":
            assert process.stdout.readline() == "has begun\n"
        yield process
        process.kill()


def begin(process: "subprocess.Popen[str]") -> None:
    """Has a mapper begin."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("user\n")
    process.stdin.flush()
    assert process.stdout.readline() == "has begun\n"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    holder = RegionHolder(tmp_path / "region", TOKEN, Region.create(mmap.PAGESIZE, GIB))
    yield tmp_path / "region"
    holder.close()
    assert not (tmp_path / "region").exists()


@pytest.fixture
def other(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that may copy."""
    with other_process(path, "user") as process:
        yield process


def serve(path: Path) -> TakenRegion:
    return take_region(path, TOKEN, as_store=True)


def test_a_store_gets_the_same_memory_and_the_names_of_users_and_earlier_stores(
    path: Path, other: "subprocess.Popen[str]"
) -> None:
    with other_process(path, "store") as store:
        taken = serve(path)
        assert taken.users == (ProcessId.of(other.pid),)
        assert taken.region.map()[:4] == b"mark"
        # The caller itself is not one of the others.
        assert serve(path).stores == taken.stores == (ProcessId.of(store.pid),)
    mapped = take_region(path, TOKEN)
    assert (mapped.users, mapped.stores, mapped.region_id) == ((), (), taken.region_id)


def test_a_process_that_only_maps_the_region_is_no_user(path: Path) -> None:
    with other_process(path, "mapper") as worker:
        assert serve(path).users == ()
        begin(worker)
        begin(worker)
        assert serve(path).users == (ProcessId.of(worker.pid),)


def test_the_ranks_of_a_worker_begin_together(path: Path) -> None:
    with other_process(path, "mapper") as follower:
        begin_use(path, TOKEN, serve(path).region_id, [follower.pid])
        assert set(serve(path).users) == {ProcessId.of(os.getpid()), ProcessId.of(follower.pid)}


def test_who_maps_another_region_cannot_begin(path: Path) -> None:
    with pytest.raises(PermissionError, match="has been replaced: restart this worker to use it"):
        begin_use(path, TOKEN, "of an earlier holder")
    assert serve(path).users == ()


def test_a_process_is_forgotten_once_it_is_gone_for_the_settle_time(path: Path, other: "subprocess.Popen[str]") -> None:
    user = ProcessId.of(other.pid)
    other.kill()
    other.wait()
    assert serve(path).users == (user,)
    time.sleep(exit_watch.SETTLE_S + 0.05)
    assert serve(path).users == ()


def test_only_the_token_opens(path: Path) -> None:
    for token in ("", "another", "ä"):
        with pytest.raises(PermissionError, match="the cluster token is wrong"):
            take_region(path, token)
    assert path.stat().st_mode & 0o777 == 0o600
    take_region(path, TOKEN)


NO_PID = b'{"token": "", "do": "begin", "follower_pids": [Infinity]}'


@pytest.mark.parametrize(
    "packet", [b"", b"\xff", b"null", b"[]", b'{"token": "\\ud800", "do": "take"}', b"[" * 60000, NO_PID]
)
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
    for do in (f"{MAP}n", SERVE.upper(), "take", [BEGIN]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.connect(str(path))
            caller.send(json.dumps({"token": TOKEN, "do": do}).encode())
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
