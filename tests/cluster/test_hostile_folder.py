"""A cluster started among packages that share our names."""

import os
from pathlib import Path

import pytest

from tandem.client import TandemClient
from tandem.deploy.host.process_tree import end_processes
from tests.cluster.command import start
from tests.cluster.conftest import Clusters

HOSTILE = (
    *("engine", "worker", "kvtransfer", "prefill_worker", "decode_worker", "both_worker", "router", "deploy"),
    *("bench", "cli", "proto", "benchmarks", "tests"),
)


@pytest.mark.slow
def test_cluster_starts_among_packages_of_the_same_names(
    clusters: Clusters, tmp_path: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters.close()
    for name in HOSTILE:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('imported by mistake')\n")
    earlier = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([earlier] if earlier else [])]))
    server = start("--model", "smollm2-135m-instruct", "--num-pages", "64", runtime_dir=tmp_path / "run", cwd=tmp_path)
    try:
        with TandemClient(server.address) as client:
            assert [token for r in client.complete("hi", max_tokens=3) for token in r.token_ids]
    finally:
        end_processes([p for p in server.tree if p.is_alive()], 5.0)
