"""What one connection's bytes cost the router's loop, before and after its key is known."""

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess

KEY = b"secret"
FLOOD_S = 4.0
# CPU time, which other processes do not lengthen. Without limits it was 0.05 to 0.6 s.
MAX_TURN_S = 0.04
MAX_MEMORY_BYTES = 64 * 2**20
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
# The end of a head, and the bytes that follow for ever.
FLOODS = {
    "trailers": (CHUNKED + b"0\r\n", b"a:b\r\n" * 50_000),
    "endless trailer": (CHUNKED + b"0\r\na: ", b"x" * 250_000),
    "chunk extension": (CHUNKED + b"1;a=", b"x" * 250_000),
    "tiny chunks": (CHUNKED, b"1\r\n \r\n" * 42_000),
    "headers": (b"", b"a:b\r\n" * 50_000),
    "body": (b"content-length: 8000000\r\n\r\n", b" " * 250_000),
}


class Meter:
    """Measures the loop's longest turn and the process's memory."""

    def __init__(self) -> None:
        self.longest_turn_s = 0.0
        self.num_bytes = 0
        self._first_bytes = _resident_bytes()

    async def run(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest_turn_s = max(self.longest_turn_s, time.thread_time() - began)
            self.num_bytes = max(self.num_bytes, _resident_bytes() - self._first_bytes)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def flood(address: tuple[str, int], begin: bytes, blob: bytes, key: bytes, until: float) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n" % key
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0) as connection:
            connection.sendall(head + b"content-type: application/json\r\n" + begin)
            while time.monotonic() < until:
                connection.sendall(blob)


@pytest.mark.slow
@pytest.mark.parametrize("key", [b"wrong", KEY])
@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_holds_up_nobody(kind: str, key: bytes, router_model_dir: Path) -> None:
    process = RouterProcess(
        RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, api_keys=(KEY.decode(),))
    )
    try:
        host, _, port = process.start().http.rpartition(":")
        loop = process._loop_thread.loop
        assert loop is not None
        meter = Meter()
        measuring = asyncio.run_coroutine_threadsafe(meter.run(), loop)
        flood((host, int(port)), *FLOODS[kind], key, time.monotonic() + FLOOD_S)
        process.probe()
        measuring.cancel()
        assert 0.0 < meter.longest_turn_s < MAX_TURN_S
        assert meter.num_bytes < MAX_MEMORY_BYTES
    finally:
        process.stop()
