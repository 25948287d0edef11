from pathlib import Path

import pytest
import torch

from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights import fingerprint
from tandem.engine.weights.fingerprint import model_fingerprint
from tandem.engine.weights.loader import load_weights
from tests.cluster.conftest import save_tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_one_fingerprint_on_every_device(tmp_path: Path, dtype: torch.dtype) -> None:
    save_tiny_model(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    found = set()
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = build_model(config, dtype, device)
        load_weights(model, tmp_path, "auto", None, device, lambda doing: None)
        found.add(model_fingerprint(model))
    assert len(found) == 1


@pytest.mark.parametrize("shape", [(7,), (40, 33), (300, 1000), (4, 3, 5)])
def test_sums_are_the_same_in_pieces_of_any_size(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    sums = fingerprint._row_sums(weight)
    for num_elements in (64, 2**25):
        monkeypatch.setitem(fingerprint._CHUNK_ELEMENTS, "cuda", num_elements)
        assert torch.equal(fingerprint._row_sums(weight.cuda()).cpu(), sums)
