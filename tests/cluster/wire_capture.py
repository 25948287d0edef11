"""Captures an interface's traffic. Needs root."""

import contextlib
import socket
import struct
import threading
from collections import defaultdict
from types import TracebackType

ETH_P_ALL, ETH_P_IP = 0x0003, 0x0800
LOOPBACK = "lo"
# Linux constants missing from socket.
SO_RCVBUFFORCE, SOL_PACKET, PACKET_STATISTICS = 33, 263, 6
BUFFER_BYTES = 256 * 2**20
ETHERNET_BYTES = 14
TCP = 6
# TCP sequence numbers wrap here.
MODULUS = 2**32


class WireCapture:
    """Captures while the context is open."""

    def __init__(self, interface: str = LOOPBACK) -> None:
        self._interface = interface
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.bind((interface, ETH_P_ALL))
        self._socket.settimeout(0.1)
        self._frames: list[bytes] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="capture", daemon=True)

    def __enter__(self) -> "WireCapture":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        statistics = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self._socket.close()
        _, num_dropped = struct.unpack("II", statistics)
        assert not num_dropped, f"{num_dropped} packets were not captured"

    def connections(self) -> list[bytes]:
        """Return the bytes of each end of each TCP connection, in order.

        Connections may predate the capture. Frames other than TCP over IPv4 come last.
        """
        others: list[bytes] = []
        parts: defaultdict[bytes, dict[int, bytes]] = defaultdict(dict)
        for frame in self._frames:
            packet = frame[ETHERNET_BYTES:]
            if int.from_bytes(frame[ETHERNET_BYTES - 2 : ETHERNET_BYTES], "big") != ETH_P_IP or packet[9] != TCP:
                others.append(frame)
                continue
            header_bytes = (packet[0] & 0x0F) * 4
            total_bytes = int.from_bytes(packet[2:4], "big") or len(packet)
            segment = packet[header_bytes:total_bytes]
            payload = segment[(segment[12] >> 4) * 4 :]
            if payload:
                # Identifies one direction of a connection.
                parts[packet[12:20] + segment[:4]][int.from_bytes(segment[4:8], "big")] = payload
        return [_in_order(said) for said in parts.values()] + others

    def _read(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                frame, (_, _, kind, *_) = self._socket.recvfrom(2**17)
                # Loopback delivers each packet twice.
                if self._interface != LOOPBACK or kind != socket.PACKET_OUTGOING:
                    self._frames.append(frame)


def _in_order(said: dict[int, bytes]) -> bytes:
    """Join segments by sequence number, dropping duplicates."""
    # First segment, allowing for a wrap.
    first = next(number for number in said if all((other - number) % MODULUS < MODULUS // 2 for other in said))
    whole = bytearray()
    for number in sorted(said, key=lambda number: (number - first) % MODULUS):
        position = (number - first) % MODULUS
        if position <= len(whole):
            whole[position : position + len(said[number])] = said[number]
        else:
            # Overlap or gap.
            whole += said[number]
    return bytes(whole)
