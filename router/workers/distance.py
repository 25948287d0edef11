"""Distance of a handover: within a host (NVLink or shared memory), within a rack (one switch), or beyond."""

from typing import Protocol

# In order of handover time.
SAME_HOST, SAME_RACK, ELSEWHERE = DISTANCES = (0, 1, 2)


class Place(Protocol):
    """
    Attributes:
        rack: "" if unknown.
    """

    host: str
    rack: str


def distance(one: Place, other: Place) -> int:
    if one.host == other.host:
        return SAME_HOST
    return SAME_RACK if one.rack == other.rack else ELSEWHERE


def place_at(worker: Place, distance: int) -> str:
    """Returns a key shared exactly by the workers at most `distance` apart."""
    if distance == SAME_HOST:
        return worker.host
    return worker.rack if distance == SAME_RACK else ""
