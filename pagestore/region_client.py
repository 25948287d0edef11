"""Gets a node's region from its holder."""

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.pagestore.region import Region
from tandem.pagestore.region_holder import BEGIN, MAP, MAX_PACKET_BYTES, SERVE
from tandem.processes import ProcessId

# The holder may be busy with all workers of a node.
TIMEOUT_S = 30.0
_RETRY_S = 0.05


class TakenRegion(NamedTuple):
    """
    Attributes:
        region_id: new for each region; processes exchange slots only within one.
        users: for a store: workers that may copy for earlier stores.
        stores: for a store: earlier stores that have not exited. A worker may begin with them, so users that are read
            meanwhile are not all.
    """

    region: Region
    region_id: str
    users: tuple[ProcessId, ...]
    stores: tuple[ProcessId, ...]


def take_region(path: Path, token: str, *, as_store: bool = False) -> TakenRegion:
    """Raises OSError: the holder does not answer or refuses."""
    answer, fds = _ask(path, token, SERVE if as_store else MAP)
    if len(fds) != 1:
        raise OSError(f"{path} sent {len(fds)} descriptors instead of 1")
    users, stores = (tuple(ProcessId(*each) for each in answer.get(name, ())) for name in ("users", "stores"))
    return TakenRegion(Region(fds[0]), answer["region_id"], users, stores)


def begin_use(path: Path, token: str, region_id: str, follower_pids: Sequence[int] = ()) -> None:
    """Tells the holder that this process may copy from now on. A worker calls it before its first session.

    Args:
        follower_pids: of the worker's other ranks, which may copy too.

    Raises:
        OSError: as for `take_region`, or the holder has another region.
    """
    _ask(path, token, BEGIN, region_id=region_id, follower_pids=list(follower_pids))


def _ask(path: Path, token: str, do: str, **more: Any) -> tuple[dict[str, Any], list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
        holder.settimeout(TIMEOUT_S)
        _connect(holder, path)
        holder.send(json.dumps({"token": token, "do": do, **more}).encode())
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
