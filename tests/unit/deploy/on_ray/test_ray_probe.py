"""Whether a node of Ray's is there is seen at its socket, without waiting."""

import socket
from pathlib import Path

from tandem.deploy.on_ray.ray_probe import node_is_up


def test_a_node_is_up_as_long_as_somebody_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "raylet")
    assert not node_is_up(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        # A node that has been killed leaves the name behind.
        assert not node_is_up(path)
        listening.listen(1)
        # It lets nobody in: from some caller on the others would wait.
        assert all(node_is_up(path) for _ in range(5))
    assert not node_is_up(path)
