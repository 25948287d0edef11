"""Which nodes of a Ray a cluster's processes go to. Nothing here knows Ray."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

HOST, PACK, SPREAD = PLACEMENT_STRATEGIES = ("host", "pack", "spread")


class FreeNode(NamedTuple):
    """A node with what nobody has taken of it.

    Attributes:
        node_id: its name in Ray.
        address: at which Ray knows it.
        free: how much of "CPU", "GPU" and so on.
    """

    node_id: str
    address: str
    free: Mapping[str, float]


def choose_nodes(nodes: Sequence[FreeNode], needs: Sequence[Mapping[str, float]], strategy: str) -> list[str]:
    """A node for each process, by its address.

    Args:
        nodes: the launcher's first.
        needs: what each process takes of one node.
        strategy: PACK: on as few nodes as may be, those with most room first behind the launcher's; SPREAD: one after
            the other over all nodes that have room.

    Raises:
        ValueError: there is no room for one; the message says for what, and what is left where.
    """
    free = {node.address: dict(node.free) for node in nodes}
    first, *others = free
    # A packed worker goes where others are, and else where the most of them will find room.
    order = [first, *sorted(others, key=lambda address: -_room(free[address], needs))]
    num_placed: Counter[str] = Counter()
    chosen = []
    for need in needs:
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
        chosen.append(address)
    return chosen


def _fits(free: Mapping[str, float], need: Mapping[str, float]) -> bool:
    return all(free.get(resource, 0.0) >= amount for resource, amount in need.items())


def _room(free: Mapping[str, float], needs: Sequence[Mapping[str, float]]) -> int:
    """How many of these processes a node could take, each being like the first."""
    return min(int(free.get(resource, 0.0) // amount) for resource, amount in needs[0].items())


def _text(amounts: Mapping[str, float], of: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(resource, 0.0):g} {resource}" for resource in of)
