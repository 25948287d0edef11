"""The cluster that clients talk to, started with only its model, and the table of what passed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.engine.weights.resolve import resolve_model
from tests.clients.page import PAGE, Row, with_rows
from tests.cluster.command import Server, start

MODEL = "smollm2-135m-instruct"
# With clients on the same cores.
STOP_S = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    grpc_address: str
    model_dir: Path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server: Server = start("--model", MODEL, runtime_dir=tmp_path_factory.mktemp("runtime"))
    try:
        found = re.search(r"over HTTP at (\S+)", "".join(server.output))
        assert found is not None
        yield Served(found[1], server.address, resolve_model(MODEL))
    finally:
        server.process.terminate()
        server.process.wait(STOP_S)
        server.finish()


@pytest.fixture(scope="session")
def passed() -> Iterator[dict[str, Row]]:
    """Rows of docs/clients.md by client; the session's end writes them."""
    rows: dict[str, Row] = {}
    yield rows
    PAGE.write_text(with_rows(PAGE.read_text(), rows.values()))
