"""Raw HTTP, for requests that no client library sends."""

import json
import re
import socket

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def read_one(connection: socket.socket) -> bytes:
    """Returns a response with a content-length, whose head and body may come apart; less if the connection ends."""
    received, num_bytes = b"", None
    while num_bytes is None or len(received) < num_bytes:
        if not (part := connection.recv(65536)):
            break
        received += part
        head, is_whole, _ = received.partition(b"\r\n\r\n")
        if is_whole:
            found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            assert found is not None, head
            num_bytes = len(head) + 4 + int(found[1])
    return received


def error_of(response: bytes) -> tuple[int, str]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]
