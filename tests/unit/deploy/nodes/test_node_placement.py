from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.nodes import node_placement
from tandem.deploy.nodes.node_placement import NodePlacement


def test_workers_wait_for_room_if_every_node_is_announced_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error here would end the supervision, and the cluster with it."""
    taken: list[tuple[str, Any]] = []
    monkeypatch.setattr(node_placement, "_free_nodes", list)
    monkeypatch.setattr(NodePlacement, "_worker_need", lambda self, name: {"CPU": 1.0})
    monkeypatch.setattr(NodePlacement, "_take_room", lambda self, name, address, node_id: taken.append((name, node_id)))
    placement = NodePlacement.__new__(NodePlacement)
    monkeypatch.setattr(placement, "_config", SimpleNamespace(placement_strategy="pack"), raising=False)
    placement.reserve(["worker-2", "worker-3"])
    assert taken == [("worker-2", None), ("worker-3", None)]
