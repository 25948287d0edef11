"""Gets a node's region from its holder."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

from tandem.pagestore.region import Region
from tandem.pagestore.region_holder import GIVE_BACK, MAX_PACKET_BYTES, TAKE
from tandem.processes import ProcessId

# The holder may be busy with all workers of a node.
TIMEOUT_S = 30.0
_RETRY_S = 0.05


class TakenRegion(NamedTuple):
    """
    Attributes:
        region_id: new for each region; processes exchange slots only within one.
        users: other processes that have taken the region and may use it.
    """

    region: Region
    region_id: str
    users: tuple[ProcessId, ...]


def take_region(path: Path, token: str) -> TakenRegion:
    """Raises OSError: the holder does not answer or refuses."""
    answer, fds = _ask(path, token, TAKE)
    if len(fds) != 1:
        raise OSError(f"{path} sent {len(fds)} descriptors instead of 1")
    return TakenRegion(Region(fds[0]), answer["region_id"], tuple(ProcessId(*user) for user in answer["users"]))


def give_back_region(path: Path, token: str) -> None:
    """Tells the holder that this process maps the region no more. Raises OSError: as for `take_region`."""
    _ask(path, token, GIVE_BACK)


def _ask(path: Path, token: str, do: str) -> tuple[dict[str, Any], list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
        holder.settimeout(TIMEOUT_S)
        _connect(holder, path)
        holder.send(json.dumps({"token": token, "do": do}).encode())
        packet, fds, _, _ = socket.recv_fds(holder, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not packet:
        raise ConnectionError(f"{path} gave no answer")
    answer = json.loads(packet)
    if "error" in answer:
        for fd in fds:
            os.close(fd)
        raise PermissionError(f"{path}: {answer['error']}")
    return answer, fds


def _connect(holder: socket.socket, path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            holder.connect(str(path))
            return
        except BlockingIOError:
            # Too many callers wait.
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} has no room for another caller") from None
            time.sleep(_RETRY_S)
