"""Layers of experts, whole and in shares of several devices."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine.layers.experts.linear import ExpertShare
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import TorchOps
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.linears import Linears
from tandem.engine.models.mlp.base import Mlp
from tandem.engine.models.mlp.dense import DenseMlp
from tandem.engine.models.mlp.sparse import SparseMlp
from tandem.engine.weights.fp8 import read_fp8
from tests.fakes.fp8_checkpoints import EXPERTS, make_model, save_fp8

CPU = torch.device("cpu")
LAYER = 1
PREFIX = f"model.layers.{LAYER}."
# Of 4 experts of 256 numbers.
SHARES = {
    "experts": [ExpertShare(0, 2, 0, 256), ExpertShare(2, 2, 0, 256)],
    "uneven experts": [ExpertShare(0, 1, 0, 256), ExpertShare(1, 3, 0, 256)],
    "sizes": [ExpertShare(0, 4, 0, 128), ExpertShare(0, 4, 128, 128)],
    "both": [ExpertShare(first, 2, offset, 128) for first in (0, 2) for offset in (0, 128)],
}
FAMILIES = ("mixtral", "qwen2_moe", "dots1")
KINDS = ("plain", "at_load", "channels_dynamic", "tensors_dynamic", "blocks", "fp8_blocks")


class OneLayer:
    """A layer's MLP, loaded as a model loads it."""

    def __init__(self, path: Path, share: ExpertShare | None = None, quantization: str = "auto") -> None:
        self.config = ModelConfig.from_dir(path).quantized(quantization)
        linears = Linears(self.config, LAYER, torch.float32, CPU)
        self.mlp = SparseMlp(linears, share)
        self._path = path

    def load(self, **changed: torch.Tensor) -> "OneLayer":
        weights: Any = load_file(self._path / "model.safetensors")
        weights = {**weights, **changed}.items()
        if self.config.quantization is not None:
            weights = read_fp8(weights, self.config.quantization, self, CPU)  # type: ignore[arg-type]
        parameters = {f"{PREFIX}{name}": parameter for name, parameter in self.mlp.named_parameters()}
        missing = set(parameters)
        for name, tensor in weights:
            if not name.startswith(PREFIX) or "self_attn" in name or "layernorm" in name:
                continue
            part = self.mlp.held_part(name.removeprefix(PREFIX), tensor)
            if part is not None:
                assert part.shape == parameters[name].shape, name
                parameters[name].copy_(part)
                missing.remove(name)
        assert not missing
        self.mlp.loaded()
        return self

    def projections(self) -> Iterator[str]:
        for layer in range(self.config.num_layers):
            yield from (f"model.layers.{layer}.self_attn.{part}_proj" for part in "qkvo")
            is_sparse = self.config.is_sparse(layer)
            names = self.mlp.projections() if is_sparse else (f"mlp.{part}_proj" for part in ("gate", "up", "down"))
            yield from (f"model.layers.{layer}.{name}" for name in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = Norm(torch.ones(self.config.hidden_size), 1e-6)
        return self.mlp.forward(x.clone(), norm, TorchOps())


def save(family: str, path: Path, kind: str) -> None:
    size = {"intermediate_size": 256} if family == "mixtral" else {"moe_intermediate_size": 256}
    model = make_model(family, **size)
    if kind in ("plain", "at_load"):
        model.save_pretrained(path)
    else:
        save_fp8(model, path, kind)


def rows(num_rows: int = 40) -> torch.Tensor:
    return torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(5))


def num_weight_bytes(layer: OneLayer) -> int:
    """Return the size of all weights except the router's, which all shares hold."""
    weights = (named for named in layer.mlp.named_parameters() if named[0].endswith("weight"))
    return sum(tensor.nbytes for name, tensor in weights if not name.endswith(".gate.weight"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_all_shares_sum_to_the_layers(family: str, kind: str, tmp_path: Path) -> None:
    save(family, tmp_path, kind)
    how = "fp8" if kind == "at_load" else "auto"
    x, whole = rows(), OneLayer(tmp_path, quantization=how).load()
    expected = whole.forward(x) - x
    for shares in SHARES.values():
        parts = [OneLayer(tmp_path, share, how).load() for share in shares]
        # Each returns its residual too.
        total = sum((part.forward(x) - x for part in parts), torch.zeros(()))
        # FP8 inputs of a part of an expert have scales of their own, if these are per token: they round otherwise.
        differs = kind in ("at_load", "channels_dynamic", "tensors_dynamic") and shares[0].size < 256
        error = float((total - expected).norm() / expected.norm())
        assert error < (0.05 if differs else 1e-5)
        assert sum(map(num_weight_bytes, parts)) == num_weight_bytes(whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_share_alone_has_the_shared_expert(family: str, tmp_path: Path) -> None:
    save(family, tmp_path, "plain")
    for shares in SHARES.values():
        owners = [share.has_shared for share in shares]
        assert owners == [True] + [False] * (len(shares) - 1)
        for share in shares:
            held = OneLayer(tmp_path, share).mlp._experts.shared
            assert (held is not None) == (share.has_shared and family != "mixtral")


def test_experts_of_other_shares_contribute_nothing(tmp_path: Path) -> None:
    save("mixtral", tmp_path, "plain")
    x = rows(200)
    parts = [OneLayer(tmp_path, share).load() for share in SHARES["experts"]]
    changes = [(part.forward(x) - x).abs().sum(1) for part in parts]
    # Of two experts that a token chooses, both, one or none are in a share.
    assert [int((change == 0).sum()) > 0 for change in changes] == [True, True]
    assert not ((changes[0] == 0) & (changes[1] == 0)).any()


@pytest.mark.parametrize(
    ("share", "kind", "message"),
    [
        (ExpertShare(2, 3, 0, 256), "plain", "experts 2 to 4 are no part of n_routed_experts 4"),
        (ExpertShare(-1, 2, 0, 256), "plain", "experts -1 to 0 are no part of n_routed_experts 4"),
        (ExpertShare(0, 0, 0, 256), "plain", "are no part of n_routed_experts 4"),
        (ExpertShare(0, 4, 128, 256), "plain", "256 numbers from 128 on are no part of moe_intermediate_size 256"),
        (ExpertShare(0, 4, 64, 128), "blocks", "share of moe_intermediate_size begins at 64, no multiple of 128"),
        (ExpertShare(0, 4, 0, 64), "blocks", r"experts.0.gate_proj is \(64, 256\), but blocks of 128x128"),
        (ExpertShare(0, 4, 0, 24), "channels_dynamic", r"gate_proj is \(24, 256\), but FP8 products"),
    ],
)
def test_refuses_shares_that_are_none(share: ExpertShare, kind: str, message: str, tmp_path: Path) -> None:
    save("dots1", tmp_path, kind)
    with pytest.raises(ValueError, match=message):
        OneLayer(tmp_path, share)


def test_a_share_refuses_tensors_larger_than_the_configuration_says(tmp_path: Path) -> None:
    save("dots1", tmp_path, "plain")
    layer = OneLayer(tmp_path, ExpertShare(0, 2, 128, 128))
    up, down = f"{PREFIX}mlp.experts.1.up_proj.weight", f"{PREFIX}mlp.experts.1.down_proj.weight"
    with pytest.raises(ValueError, match=rf"^tensor {up} has shape \(512, 256\), not 256 rows$"):
        layer.load(**{up: torch.zeros(512, 256)})
    with pytest.raises(ValueError, match=rf"^tensor {down} has shape \(256, 512\), not 256 columns$"):
        layer.load(**{down: torch.zeros(256, 512)})


def test_stacked_parameters_are_the_same_memory(tmp_path: Path) -> None:
    for kind in ("plain", "tensors_static"):
        save("qwen2_moe", tmp_path, kind)
        mlp = OneLayer(tmp_path).load().mlp
        stacked = dict(mlp.stacked_parameters())
        by_name = dict(mlp.named_parameters())
        assert sum(tensor.nbytes for tensor in stacked.values()) == sum(tensor.nbytes for tensor in by_name.values())
        assert len(stacked) < len(by_name)
        for tensor in stacked.values():
            tensor.view(torch.uint8).zero_() if tensor.dtype is FP8_DTYPE else tensor.zero_()
        assert all(not tensor.float().any() for tensor in by_name.values())


def test_kinds_tell_layers_with_other_kernels_apart(tmp_path: Path) -> None:
    kinds = set()
    shared = "model.layers.1.mlp.shared_expert"
    for ignored in ((), (shared,), (f"{shared}.down_proj",), ("re:.*experts",)):
        save_fp8(make_model("qwen2_moe"), tmp_path, "channels_dynamic")
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"]["ignore"].extend(ignored)
        path.write_text(json.dumps(config))
        layer = OneLayer(tmp_path)
        kinds.add(layer.mlp.kind)
        dense: Mlp = DenseMlp(Linears(layer.config, LAYER, torch.float32, CPU))
        kinds.add(dense.kind)
        assert OneLayer(tmp_path).mlp.kind == layer.mlp.kind
    assert len(kinds) == 5


def test_every_family_has_a_router_in_plain_numbers(tmp_path: Path) -> None:
    for family in EXPERTS:
        save(family, tmp_path / family, "plain")
        mlp = OneLayer(tmp_path / family, quantization="fp8").mlp
        assert mlp._experts.router.weight.dtype is torch.float32
        assert not any("gate.weight" in name or "expert_gate" in name for name in mlp.projections())
