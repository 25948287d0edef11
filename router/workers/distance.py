"""How far apart two workers are, as handovers between them go: over NVLink or shared memory, through one switch, or
further."""

from typing import Protocol

# A handover within a host is the first, and further ones take longer.
SAME_HOST, SAME_RACK, ELSEWHERE = DISTANCES = (0, 1, 2)


class Place(Protocol):
    """Where a worker is; tandem.router.workers.worker.Worker is one.

    Attributes:
        host: the same for workers of one host.
        rack: the same for hosts of one rack; "" for all of which nobody has said.
    """

    host: str
    rack: str


def distance(one: Place, other: Place) -> int:
    if one.host == other.host:
        return SAME_HOST
    return SAME_RACK if one.rack == other.rack else ELSEWHERE


def place_at(worker: Place, distance: int) -> str:
    """The same for two workers exactly if they are at most so far apart."""
    if distance == SAME_HOST:
        return worker.host
    return worker.rack if distance == SAME_RACK else ""
