"""Messages between the leader and a follower while they serve."""

import select
import socket
from collections import deque

# Above every message; the kernel refuses larger ones.
MAX_MESSAGE_BYTES = 128 << 10


class MessageChannel:
    """Whole messages, in order, over one end of a pair of sockets. Only `wait` waits. Belongs to one thread."""

    def __init__(self, end: socket.socket) -> None:
        """Args: end: of `pair`; this object closes it."""
        self._end = end
        self._end.setblocking(False)
        # Messages that did not fit into the socket's buffer.
        self._unsent: deque[bytes] = deque()

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message: bytes) -> None:
        """
        Raises:
            ConnectionError: the other process has ended.
        """
        assert 0 < len(message) <= MAX_MESSAGE_BYTES
        self._unsent.append(message)
        self._flush()

    def receive(self) -> list[bytes]:
        """Returns the messages that have come, oldest first.

        Raises:
            ConnectionError: the other process has ended.
        """
        self._flush()
        messages: list[bytes] = []
        while True:
            try:
                message = self._end.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return messages
            if not message:
                raise ConnectionError("the other process has ended")
            messages.append(message)

    def wait(self, timeout_s: float) -> bool:
        """Waits until a message comes, or the other process ends. Returns whether one of them did."""
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        poll = select.poll()
        poll.register(self._end, events)
        return bool(poll.poll(timeout_s * 1e3))

    def close(self) -> None:
        self._end.close()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._end.send(self._unsent[0])
            except BlockingIOError:
                return
            self._unsent.popleft()
