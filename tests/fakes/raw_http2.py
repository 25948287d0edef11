"""Raw HTTP/2, for gRPC calls that no library makes."""

import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, CONTINUATION = 0, 1, 3, 4, 9
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def connect(address: str, window: int = 65535) -> socket.socket:
    """Open a connection. Args: window: bytes the server may send per stream."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10.0)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window)))
    return connection


def call(stream: int, method: str, message: bytes, num_announced: int | None = None) -> bytes:
    """Return the frames of a call on an odd-numbered stream above all earlier ones.

    Args:
        num_announced: announced length; if larger than the message, the message never ends.
    """
    announced = len(message) if num_announced is None else num_announced
    ends = END_STREAM if announced == len(message) else 0
    body = b"\0" + struct.pack(">I", announced) + message
    return frame(HEADERS, END_HEADERS, stream, _head(method)) + frame(DATA, ends, stream, body)


def call_without_end_of_headers(stream: int, method: str) -> bytes:
    """Return the first frame of a call, whose next header has a value of almost 2 GiB, to be sent as CONTINUATION."""
    # A length above 126 follows as groups of 7 bits; this one is 127 + 2**31 - 2**7.
    value_of_2_gib = _literal(b"x-a") + b"\x7f\x80\xff\xff\xff\x07"
    return frame(HEADERS, 0, stream, _head(method) + value_of_2_gib)


def _head(method: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(_literal(name.encode()) + _literal(value.encode(), b"") for name, value in fields.items())


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(text: bytes, prefix: bytes = b"\0") -> bytes:
    # Every text is shorter than 127 bytes, so its length takes one byte.
    return prefix + bytes((len(text),)) + text


def frames_until(connection: socket.socket, kind: int) -> list[int]:
    """Return the kinds of the received frames, up to the first of `kind`."""
    kinds: list[int] = []
    received = b""
    while kind not in kinds:
        part = connection.recv(65536)
        assert part, "the connection was closed"
        received += part
        while len(received) >= 9 and len(received) >= (end := 9 + int.from_bytes(received[:3], "big")):
            kinds.append(received[3])
            received = received[end:]
    return kinds
