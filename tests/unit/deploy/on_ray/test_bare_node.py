"""Ray's node is started without services that nobody uses, and found as soon as it is up; other Rays start as ever."""

from collections.abc import Collection

import pytest

from tandem.deploy.on_ray.bare_node import UNUSED_SERVICES, bare_node


class FakeNode:
    """Stands for Ray's node, which starts processes."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start_gcs_server(self) -> None:
        self.started.append("gcs")

    def start_monitor(self) -> None:
        self.started.append("monitor")

    def start_api_server(self, *, include_dashboard: bool, raise_on_failure: bool) -> None:
        self.started.append("api server")

    def start_all(self) -> list[str]:
        self.start_gcs_server()
        self.start_monitor()
        self.start_api_server(include_dashboard=False, raise_on_failure=False)
        return self.started


class FakeServices:
    """Stands for Ray's module: it finds a node that is up at once, and one that is not after a second."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.num_waits = 0

    def watch(self, gcs_address: str) -> "FakeServices":
        assert gcs_address == "gcs:1"
        return self

    def __call__(self) -> Collection[str]:
        self.num_looks += 1
        return {"other"} if self.num_looks < 3 else {"other", "node"}

    def get_node(self, gcs_address: str, node_id: str, timeout_s: float = 30.0) -> str:
        self.num_waits += self.num_looks < 3
        return f"{gcs_address} {node_id}"


def test_what_nobody_uses_is_not_started() -> None:
    services = FakeServices()
    with bare_node(FakeNode, services, services.watch):
        assert FakeNode().start_all() == ["gcs"]
    # A Ray of somebody else's in this process has all of it.
    assert FakeNode().start_all() == ["gcs", "monitor", "api server"]


def test_the_node_is_asked_for_when_it_is_up() -> None:
    services = FakeServices()
    with bare_node(FakeNode, services, services.watch):
        assert services.get_node("gcs:1", "node") == "gcs:1 node"
    assert services.num_looks == 3 and services.num_waits == 0


def test_all_is_as_before_after_a_start_that_failed() -> None:
    services = FakeServices()
    with pytest.raises(RuntimeError), bare_node(FakeNode, services, services.watch):
        raise RuntimeError("no Ray")
    assert FakeNode().start_all() == ["gcs", "monitor", "api server"]
    assert services.get_node("gcs:1", "node") == "gcs:1 node" and services.num_waits == 1


@pytest.mark.parametrize("error", [AttributeError("_initialize"), TypeError("3 arguments"), KeyError("NodeID")])
def test_a_ray_that_works_in_another_way_starts_as_ever(error: Exception) -> None:
    class OtherNode:
        def start_everything(self) -> str:
            return "started"

    services = FakeServices()

    def cannot_watch(gcs_address: str) -> FakeServices:
        raise error

    with bare_node(OtherNode, services, cannot_watch):
        assert OtherNode().start_everything() == "started"
        assert services.get_node("gcs:1", node_id="node", timeout_s=1.0) == "gcs:1 node"
    assert not any(hasattr(OtherNode, name) for name in UNUSED_SERVICES)


def test_this_ray_has_what_is_changed() -> None:
    """Otherwise nothing would be wrong but the time that a start takes."""
    from tandem.deploy.on_ray.ray_module import node, services

    assert all(hasattr(node.Node, name) for name in UNUSED_SERVICES) and hasattr(services, "get_node")
