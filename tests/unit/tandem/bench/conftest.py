from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from benchmarks.children import Child
from tests.unit.tandem.bench.scripted_server import Script, serve_scripted


@dataclass(frozen=True, slots=True)
class Scripted:
    """A scripted server in a process of its own. Attributes: grpc, http: its endpoints."""

    child: Child
    grpc: str
    http: str

    def sent(self) -> list[tuple[float, list[float]]]:
        """Return arrival and chunk times of each request since the last call, on the monotonic clock."""
        found: list[tuple[float, list[float]]] = self.child.ask("sent")
        return found


ScriptedServers = Callable[..., Scripted]


@pytest.fixture(scope="package")
def scripted() -> Iterator[ScriptedServers]:
    """One server per script, for all tests."""
    with ExitStack() as held:
        servers: dict[Script, Scripted] = {}

        def start(script: Script | None = None) -> Scripted:
            script = script or Script()
            if script not in servers:
                child = held.enter_context(Child(serve_scripted, script))
                grpc_port, http_port = child.answer()
                url = f"http://127.0.0.1:{http_port}/v1"
                servers[script] = Scripted(child, f"grpc://127.0.0.1:{grpc_port}", url)
            servers[script].sent()
            return servers[script]

        yield start
