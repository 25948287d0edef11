"""Chooses the Ray nodes for a cluster's processes. Nothing here imports Ray."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Ray's own rounding, and that of sums.
TOLERANCE = 1e-6
HOST, PACK, SPREAD = PLACEMENT_STRATEGIES = ("host", "pack", "spread")


class FreeNode(NamedTuple):
    """Attributes: free: unused amount of each resource ("CPU", "GPU", ...)."""

    node_id: str
    address: str
    free: Mapping[str, float]


def choose_nodes(nodes: Sequence[FreeNode], needs: Sequence[Mapping[str, float]], strategy: str) -> list[str]:
    """Returns the address of a node for each process. Places large ones first, which fit fewer nodes.

    Args:
        nodes: all nodes, the launcher's first.
        strategy: PACK: few nodes, the launcher's first, then by free room; SPREAD: round robin over nodes with room.

    Raises:
        ValueError: no node has room for a process; the message lists the free resources.
    """
    free = {node.address: dict(node.free) for node in nodes}
    first, *others = free
    order = [first, *sorted(others, key=lambda address: -_room(free[address], needs))]
    num_placed: Counter[str] = Counter()
    chosen = [""] * len(needs)
    for index in sorted(range(len(needs)), key=lambda i: -max(needs[i].values())):
        need = needs[index]
        fitting = [address for address in order if _fits(free[address], need)]
        if not fitting:
            left = "; ".join(f"{address} has {_text(free[address], need)}" for address in free)
            raise ValueError(
                f"no node of the Ray has room for {_text(need, need)}, for one process of the cluster: {left}"
            )
        if strategy == SPREAD:
            address = min(fitting, key=lambda a: num_placed[a])
        else:
            address = next((a for a in fitting if num_placed[a]), fitting[0])
        for resource, amount in need.items():
            free[address][resource] -= amount
        num_placed[address] += 1
        chosen[index] = address
    return chosen


def _fits(free: Mapping[str, float], need: Mapping[str, float]) -> bool:
    return all(free.get(resource, 0.0) + TOLERANCE >= amount for resource, amount in need.items())


def _room(free: Mapping[str, float], needs: Sequence[Mapping[str, float]]) -> int:
    """Returns the number of processes like the first that fit on a node."""
    return min(int(free.get(resource, 0.0) / amount + TOLERANCE) for resource, amount in needs[0].items())


def _text(amounts: Mapping[str, float], of: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(resource, 0.0):g} {resource}" for resource in of)
