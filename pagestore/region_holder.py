"""Owns a node's region and hands it to the cluster's processes, from a thread of the supervising process.

So the region outlives every process that uses it. The holder remembers who may still touch it: a new store grants no
slot before each of them has spoken or is gone.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
from pathlib import Path

from tandem.exit_watch import ExitWatch
from tandem.pagestore.region import Region
from tandem.processes import ProcessId
from tandem.rpc.auth import TokenSet

TAKE, GIVE_BACK = "take", "give_back"
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
        except (ValueError, KeyError, TypeError, RecursionError):
            # Not JSON, no such fields, a token that is not Unicode, or lists nested too deep.
            return
        if not is_known:
            _say(caller, {"error": "the cluster token is wrong"})
            return
        try:
            user = ProcessId.of(pid)
        except ProcessLookupError:
            return
        if do == TAKE:
            self._hand_over(caller, user)
        elif do == GIVE_BACK:
            self._users.pop(user, None)
            _say(caller, {})

    def _hand_over(self, caller: socket.socket, user: ProcessId) -> None:
        self._users = {other: watch for other, watch in self._users.items() if not watch.is_gone()}
        others = [[other.pid, other.start_time] for other in self._users if other != user]
        is_new = user not in self._users
        # Before the caller has it.
        self._users.setdefault(user, ExitWatch(user))
        try:
            answer = {"users": others, "region_id": self._region_id}
            socket.send_fds(caller, [json.dumps(answer).encode()], [self._region.fileno()])
        except OSError:
            if is_new:
                del self._users[user]


def _say(caller: socket.socket, answer: dict[str, str]) -> None:
    caller.send(json.dumps(answer).encode())
