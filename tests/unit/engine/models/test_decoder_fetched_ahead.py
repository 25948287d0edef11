"""Matrices that kernels of few tokens fetch for the next layer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tests.fakes.random_weights import tiny_model

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}


@pytest.mark.parametrize(
    ("family", "settings", "fetching"),
    [
        ("qwen3-moe", EXPERTS, [True, True, False]),
        ("qwen3-moe", {**EXPERTS, "mlp_only_layers": [1]}, [True, False, False]),
        ("llama", {}, [False, False, False]),
    ],
)
def test_layers_with_experts_fetch_the_next_ones_first_matrix(
    family: str, settings: dict[str, Any], fetching: list[bool], tmp_path: Path
) -> None:
    tiny_model(family, 64, {"num_hidden_layers": 3, **settings}).save_pretrained(tmp_path)
    model = build_model(ModelConfig.from_dir(tmp_path), torch.float32, torch.device("cpu"))
    assert isinstance(model, DecoderModel)
    attentions = [layer.attention for layer in model._layers]
    firsts = [attention.first for attention in attentions]
    assert all(firsts)
    for number, (attention, fetches) in enumerate(zip(attentions, fetching, strict=True)):
        assert attention.last is not None
        assert attention.last.ahead is (firsts[number + 1] if fetches else None)
