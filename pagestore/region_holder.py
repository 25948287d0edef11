"""Owns a node's region and hands it to the cluster's processes, from a thread of the supervising process.

So the region outlives every process that uses it. The holder remembers who may copy for a store: a new store grants no
slot before each of them has spoken or is gone. A worker that only maps the region is none of them. It says so before it
opens its first session (BEGIN), so a worker unknown to the holder has no slot of any store.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tandem.exit_watch import ExitWatch
from tandem.pagestore.region import Region
from tandem.processes import ProcessId
from tandem.rpc.auth import TokenSet

# Requests: of a worker for the region, of a store for the region, of a worker that is about to open sessions.
MAP, SERVE, BEGIN = "map", "serve", "begin"
# One caller is served at a time, within this time.
CALLER_TIMEOUT_S = 2.0
MAX_PACKET_BYTES = 65536
_MAX_WAITING_CALLERS = 64
_STOP_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("3i")


class RegionHolder:
    """Serves callers of this user that know the token, one packet each way. pagestore/region_client.py calls it."""

    def __init__(self, path: Path, token: str, region: Region) -> None:
        """
        Args:
            path: of the socket, in a directory private to the user.
            region: becomes this object's.
        """
        self._path = path
        self._tokens = TokenSet([token])
        self._region = region
        self._region_id = secrets.token_hex(8)
        self._users: dict[ProcessId, ExitWatch] = {}
        self._stores: dict[ProcessId, ExitWatch] = {}
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(_MAX_WAITING_CALLERS)
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="region", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and gives up the region, which its users keep until they end."""
        self._stop_writer.close()
        self._thread.join(_STOP_TIMEOUT_S)
        self._path.unlink(missing_ok=True)
        self._region.close()

    def _run(self) -> None:
        with self._listener, self._stop_reader, selectors.DefaultSelector() as selector:
            for own in (self._listener, self._stop_reader):
                selector.register(own, selectors.EVENT_READ)
            while all(key.fileobj is self._listener for key, _ in selector.select()):
                with contextlib.suppress(OSError):
                    caller, _ = self._listener.accept()
                    with caller:
                        caller.settimeout(CALLER_TIMEOUT_S)
                        self._serve(caller)

    def _serve(self, caller: socket.socket) -> None:
        credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            return
        try:
            asked = json.loads(caller.recv(MAX_PACKET_BYTES))
            is_known, do = str(asked["token"]) in self._tokens, asked["do"]
            region_id, followers = asked.get("region_id"), [int(pid) for pid in asked.get("follower_pids", ())]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            # Not JSON, no such fields, a token that is not Unicode, infinity, or lists nested too deep.
            return
        if not is_known:
            _say(caller, {"error": "the cluster token is wrong"})
            return
        try:
            user = ProcessId.of(pid)
        except ProcessLookupError:
            return
        if do == MAP:
            self._hand_over(caller, {})
        elif do == SERVE:
            self._users, self._stores = _without_gone(self._users), _without_gone(self._stores)
            # Before the caller has the region.
            self._stores.setdefault(user, ExitWatch(user))
            stores = [other for other in self._stores if other != user]
            self._hand_over(caller, {"users": _named(self._users), "stores": _named(stores)})
        elif do == BEGIN and region_id == self._region_id:
            for process in (user, *_living(followers)):
                self._users.setdefault(process, ExitWatch(process))
            _say(caller, {})
        elif do == BEGIN:
            _say(caller, {"error": "the memory of the page store has been replaced: restart this worker to use it"})

    def _hand_over(self, caller: socket.socket, answer: dict[str, Any]) -> None:
        answer["region_id"] = self._region_id
        socket.send_fds(caller, [json.dumps(answer).encode()], [self._region.fileno()])


def _living(pids: Iterable[int]) -> Iterator[ProcessId]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            yield ProcessId.of(pid)


def _without_gone(processes: dict[ProcessId, ExitWatch]) -> dict[ProcessId, ExitWatch]:
    return {process: watch for process, watch in processes.items() if not watch.is_gone()}


def _named(processes: Iterable[ProcessId]) -> list[tuple[int, int]]:
    return [(process.pid, process.start_time) for process in processes]


def _say(caller: socket.socket, answer: dict[str, Any]) -> None:
    caller.send(json.dumps(answer).encode())
