import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.models.base import Model
from tandem.engine.weights import loader
from tandem.engine.weights.loader import checkpoint_weights, dummy_weights, load_weights
from tests.fakes.model_shapes import LLAMA_8B


def shard(model_dir: Path, files: dict[str, list[str]], weight_map: dict[str, str]) -> None:
    for order, (file, names) in enumerate(files.items()):
        save_file({name: torch.full((2, 3), float(order)) for name in names}, model_dir / file)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_as_the_index_says(tmp_path: Path) -> None:
    shard(tmp_path, {"a.safetensors": ["x", "y"], "b.safetensors": ["y", "z"]}, {"x": "a.safetensors"})
    assert list(dict(checkpoint_weights(tmp_path))) == ["x"]
    weight_map = {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = list(checkpoint_weights(tmp_path))
    assert sorted(name for name, _ in weights) == ["x", "y", "z"]
    assert {name: weight[0, 0].item() for name, weight in weights} == {"x": 0.0, "y": 1.0, "z": 1.0}


def test_incomplete_and_corrupt_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no safetensors weights"):
        list(checkpoint_weights(tmp_path))
    shard(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(ValueError, match=r"names b\.safetensors, which is not there"):
        list(checkpoint_weights(tmp_path))
    shard(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(ValueError, match="lacks 1 tensors, for example 'y'"):
        list(checkpoint_weights(tmp_path))
    shard(tmp_path, {}, {"x": "../a.safetensors"})
    with pytest.raises(ValueError, match="incomplete"):
        list(checkpoint_weights(tmp_path))
    shard(tmp_path, {}, {})
    with pytest.raises(ValueError, match="has no weight_map"):
        list(checkpoint_weights(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-4])
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        list(checkpoint_weights(tmp_path))


def test_dummy_weights_depend_on_name_and_seed_alone() -> None:
    shapes = [
        ("big.weight", (1200, 1000), torch.bfloat16),
        ("small.weight", (8, 4), torch.float32),
        ("norm.weight", (4,), torch.float32),
        ("q_proj.bias", (4,), torch.float32),
        ("model.embed_tokens.weight", (8, 4), torch.float32),
    ]
    first, again = dict(dummy_weights(shapes)), dict(dummy_weights(reversed(shapes)))
    for name, shape, dtype in shapes:
        assert first[name].shape == shape and first[name].dtype == dtype
        assert torch.equal(first[name], again[name])
        assert first[name].isfinite().all()
    assert torch.equal(first["norm.weight"], torch.ones(4))
    assert 0 < first["q_proj.bias"].abs().max() <= 0.02 and first["big.weight"].abs().max() <= 0.02
    assert 4 < first["model.embed_tokens.weight"].abs().max() <= 8
    assert not torch.equal(first["big.weight"][0], first["big.weight"][1])
    assert len(set(map(tuple, first["big.weight"][:, :8].tolist()))) == 1200, "rows repeat"
    other = dict(dummy_weights(shapes, seed=1))
    assert not torch.equal(first["small.weight"], other["small.weight"])


class RecordingModel(Model):
    config = LLAMA_8B

    def __init__(self, shapes: list[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        self.weights = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in shapes}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.weights[name].copy_(weight)

    def loaded(self) -> None:
        pass

    def hidden_states(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_loading_reports_progress_in_bytes(load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: tuple[int, ...] = (2000, 1000)
    shapes = [(name, shape, torch.float32) for name in ("a.weight", "b.weight", "c.weight")]
    save_file({name: torch.ones(shape) for name, shape, _ in shapes}, tmp_path / "model.safetensors")
    told: list[str] = []
    monkeypatch.setattr(loader, "_REPORT_INTERVAL_S", 0.0)
    model = RecordingModel(shapes)
    load_weights(model, tmp_path, load_format, None, torch.device("cpu"), told.append)
    assert all(weight.abs().max() > 0 for weight in model.weights.values())
    assert told == [f"loading weights ({done:.2f} of 0.02 GB)" for done in (0.0, 0.008, 0.016)]
    monkeypatch.setattr(loader, "_REPORT_INTERVAL_S", 60.0)
    told.clear()
    load_weights(model, tmp_path, load_format, None, torch.device("cpu"), told.append)
    assert len(told) == 1


def test_no_two_rows_of_a_large_vocabulary_are_equal() -> None:
    ((_, weight),) = dummy_weights([("lm_head.weight", (151_936, 8), torch.bfloat16)])
    assert len(weight.float().unique(dim=0)) == len(weight)


def test_layers_behind_the_model_are_left_out(tmp_path: Path) -> None:
    names = [*(f"model.layers.{layer}.weight" for layer in (0, 1, 11, 2)), "model.norm.weight"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    model = RecordingModel([(name, (2,), torch.float32) for name in names])
    model.config = replace(LLAMA_8B, num_layers=1, extra_layers=(1, 2))
    load_weights(model, tmp_path, "auto", None, torch.device("cpu"), list[str]().append)
    loaded = {name for name, weight in model.weights.items() if weight.any()}
    assert loaded == {"model.layers.0.weight", "model.layers.11.weight", "model.norm.weight"}
