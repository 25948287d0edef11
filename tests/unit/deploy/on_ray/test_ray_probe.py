"""A node's socket shows whether it runs."""

import socket
from pathlib import Path

from tandem.deploy.on_ray.ray_probe import node_is_up


def test_a_node_is_up_while_its_socket_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "raylet")
    assert not node_is_up(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        # A killed node leaves its socket file.
        assert not node_is_up(path)
        listening.listen(1)
        # No process accepts, so the backlog fills.
        assert all(node_is_up(path) for _ in range(5))
    assert not node_is_up(path)
