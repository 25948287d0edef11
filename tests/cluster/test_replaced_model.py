"""Model files replaced in a running cluster: workers never mix two models."""

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import RESTART_S, VOCAB_SIZE, Clusters, Oracle, ServedCluster, wait_until

PROMPT = [random.Random(4).randrange(VOCAB_SIZE) for _ in range(60)]


@pytest.fixture
def own_model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "own-llama"))


@pytest.fixture
def served(clusters: Clusters, tiny_config: ClusterConfig, own_model_dir: Path) -> Iterator[ServedCluster]:
    yield clusters.get(replace(tiny_config, model=str(own_model_dir)))
    clusters.close()


@pytest.mark.slow
@pytest.mark.parametrize("victims", [["prefill-0"], ["prefill-0", "decode-0"]])
def test_worker_with_other_weights_is_rejected(
    served: ServedCluster,
    victims: list[str],
    own_model_dir: Path,
    tiny_oracle: Oracle,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert tiny_oracle.confirms(PROMPT, served.complete(PROMPT).token_ids)
    weights = own_model_dir / "model.safetensors"
    kept, stat = weights.read_bytes(), weights.stat()
    tensors = load_file(weights)
    tensors["model.layers.0.self_attn.k_proj.weight"] *= -1
    # Renaming keeps the running workers' mapped file.
    save_file(tensors, own_model_dir / "next", metadata={"format": "pt"})
    (own_model_dir / "next").rename(weights)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.stat().st_size == stat.st_size
    for victim in victims:
        served.kill(victim)
    for victim in victims:
        refusal = f"{victim} could not be started again: models differ: this worker has loaded "
        wait_until(lambda refusal=refusal: refusal in caplog.text, RESTART_S, "the refusal is said")
    assert not served.client.server_info().ready
    # With the old files the worker is admitted. No client got another model's tokens.
    (own_model_dir / "next").write_bytes(kept)
    (own_model_dir / "next").rename(weights)
    served.wait_ready()
    assert tiny_oracle.confirms(PROMPT, served.complete(PROMPT).token_ids)
    served.wait_clean()
