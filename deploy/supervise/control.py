"""Control socket of a cluster, for commands of the same user: one line of JSON per message."""

import contextlib
import json
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_CREDENTIALS = struct.Struct("3i")
_MAX_LINE_BYTES = 65536
_ASK_TIMEOUT_S = 10.0
# Maximum time between two lines of an answer.
ANSWER_TIMEOUT_S = 30.0

Answer = Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]


class ControlServer:
    """Answers questions, each on its own thread."""

    def __init__(self, path: Path, answer: Answer) -> None:
        """Args: path: in a directory private to the user."""

        class Handler(socketserver.StreamRequestHandler):
            timeout = _ASK_TIMEOUT_S

            def handle(self) -> None:
                credentials = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                    return
                with contextlib.suppress(OSError):
                    try:
                        asked = json.loads(self.rfile.readline(_MAX_LINE_BYTES))
                        if not isinstance(asked, dict):
                            raise ValueError("not an object")
                    except ValueError as error:
                        self._say({"error": f"not a question: {error}"})
                        return
                    for line in answer(asked):
                        self._say(line)

            def _say(self, line: Mapping[str, Any]) -> None:
                self.wfile.write(json.dumps(line).encode() + b"\n")

        self._path = path
        path.unlink(missing_ok=True)
        self._server = _Server(str(path), Handler)
        path.chmod(0o600)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


def ask(path: Path, question: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the lines of the answer. Raises OSError if none comes within ANSWER_TIMEOUT_S."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(json.dumps(question).encode() + b"\n")
        for line in connection.makefile("rb"):
            yield json.loads(line)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
