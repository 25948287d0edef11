"""HTTP by the byte, for what no client would send."""

import json
import socket

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def error_of(response: bytes) -> tuple[int, str]:
    """Status and message of an error."""
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]
