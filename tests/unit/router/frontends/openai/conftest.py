"""Fixtures that are too slow to start for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess


@pytest.fixture(scope="package")
def address(router_model_dir: Path) -> Iterator[tuple[str, int]]:
    """Yields the HTTP port of a router without workers."""
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0))
    try:
        host, _, port = process.start().http.rpartition(":")
        yield host, int(port)
    finally:
        process.stop()
