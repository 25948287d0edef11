"""The cluster that clients talk to, started with only its model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.engine.weights.resolve import resolve_model
from tests.cluster.command import Server, start

MODEL = "smollm2-135m-instruct"


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
        server.finish()
