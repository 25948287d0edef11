"""Ray's node starts without unused services and is found at once; other versions of Ray start as usual."""

from collections.abc import Collection

import pytest

from tandem.deploy.on_ray.bare_node import UNUSED_SERVICES, bare_node


class FakeNode:
    """A fake of Ray's node."""

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
    """A fake of Ray's module: finds an alive node at once, another after a second."""

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


def test_unused_services_do_not_start() -> None:
    services = FakeServices()
    with bare_node(FakeNode, services, services.watch):
        assert FakeNode().start_all() == ["gcs"]
    # Outside the context, all services start.
    assert FakeNode().start_all() == ["gcs", "monitor", "api server"]


def test_the_node_is_looked_up_once_alive() -> None:
    services = FakeServices()
    with bare_node(FakeNode, services, services.watch):
        assert services.get_node("gcs:1", "node") == "gcs:1 node"
    assert services.num_looks == 3 and services.num_waits == 0


def test_a_failed_start_restores_everything() -> None:
    services = FakeServices()
    with pytest.raises(RuntimeError), bare_node(FakeNode, services, services.watch):
        raise RuntimeError("no Ray")
    assert FakeNode().start_all() == ["gcs", "monitor", "api server"]
    assert services.get_node("gcs:1", "node") == "gcs:1 node" and services.num_waits == 1


@pytest.mark.parametrize("error", [AttributeError("_initialize"), TypeError("3 arguments"), KeyError("NodeID")])
def test_another_version_of_ray_starts_as_usual(error: Exception) -> None:
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


def test_the_installed_ray_has_the_patched_attributes() -> None:
    """Without them, a start would only take longer."""
    from tandem.deploy.on_ray.ray_module import node, services

    assert all(hasattr(node.Node, name) for name in UNUSED_SERVICES) and hasattr(services, "get_node")
