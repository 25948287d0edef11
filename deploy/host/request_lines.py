"""Receives the routers' request lines and shows them in the launcher's terminal."""

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable

from tandem.router.observe.request_lines import MAX_LINE_BYTES, shown

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 64
_STOP_TIMEOUT_S = 2.0


class RequestLineServer:
    """An abstract Unix socket, which leaves no file, and its reader thread. Serves only this user's processes."""

    def __init__(self, show: Callable[[str], None], name: str = "") -> None:
        """
        Args:
            show: called from the thread with each line; lines are printable.
            name: known to routers; "": a new name.
        """
        self.name = name or f"tandem-requests-{secrets.token_hex(16)}"
        self._show = show
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        # Closing the writer stops the thread.
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="request-lines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop_writer.close()
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.ExitStack() as open_sockets, selectors.DefaultSelector() as selector:
            for own in (self._listener, self._stop_reader):
                open_sockets.enter_context(own)
                selector.register(own, selectors.EVENT_READ)
            is_stopping = False
            while True:
                # After a stop, pending lines are still read.
                ready = selector.select(0 if is_stopping else None)
                ends = [key.fileobj for key, _ in ready if key.fileobj is not self._stop_reader]
                if is_stopping and not ends:
                    break
                is_stopping = is_stopping or len(ends) < len(ready)
                for end in ends:
                    assert isinstance(end, socket.socket)
                    if end is self._listener:
                        self._accept(selector, open_sockets)
                    elif not self._read(end):
                        selector.unregister(end)
                        end.close()

    def _accept(self, selector: selectors.BaseSelector, open_sockets: contextlib.ExitStack) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                connection.close()
                return
            connection.setblocking(False)
            open_sockets.enter_context(connection)
            selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> bool:
        try:
            data = connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data:
            self._show(shown(data))
        return bool(data)
