"""`tandem compile` checks its options and runs every kind of batch."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tandem.deploy.cli.main import main
from tandem.deploy.compile import run_configuration
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.base import ForwardOutput
from tandem.engine.batch import Batch
from tandem.engine.engine import Engine
from tests.cluster.conftest import save_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(directory)
    return directory


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "cuda"), "torch sees no GPU here; run this on a machine with the GPU of the workers"),
        ((), "device cpu needs no compiled kernels: set --device to cuda"),
        (("--device", "cuda", "--page-size", "0"), "--page-size must be above 0, not 0"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    flags: Sequence[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["compile", "--model", "m", *flags]) == 2
    assert capsys.readouterr().err == f"tandem compile: {message}\n"


@pytest.mark.parametrize(("chunk_size", "page_size"), [(64, 16), (16, 1)])
def test_requests_of_every_kind_are_run(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, chunk_size: int, page_size: int
) -> None:
    batches: list[tuple[str, list[tuple[int, int]], bool]] = []
    forward = Engine.forward

    def recording(engine: Engine, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        lengths = [(s.cached_len, s.extend_len) for s in batch.sequences]
        batches.append((batch.mode, lengths, any(s.needs_logits for s in batch.sequences)))
        return forward(engine, batch, meanwhile)

    monkeypatch.setattr(Engine, "forward", recording)
    config = ClusterConfig(str(model_dir), max_batch_size=20, chunk_size=chunk_size, page_size=page_size)
    phases: list[str] = []
    run_configuration(config, model_dir, 0, phases.append)
    assert phases[-4:] == ["prefill", "prefill in chunks and after a cached prefix", "decode", "sampling"]
    prefills = [(lengths, sampled) for phase, lengths, sampled in batches if phase == "prefill"]
    assert any(sum(cached > 0 for cached, _ in lengths) == 2 for lengths, _ in prefills)
    assert any(len(lengths) == 4 and not any(cached for cached, _ in lengths) for lengths, _ in prefills)
    assert any(lengths == [(0, 1)] for lengths, _ in prefills)
    assert any(lengths == [(0, chunk_size)] and not sampled for lengths, sampled in prefills)
    decode_sizes = {len(lengths) for phase, lengths, _ in batches if phase == "decode"}
    assert {1, 2, 3, 16, 17, 20} <= decode_sizes
    # The longest context is the model's limit.
    assert max(cached + extend for _, lengths, _ in batches for cached, extend in lengths) > 500
