import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.latent import LatentConfig
from tandem.engine.models.quantization import Quantization
from tandem.engine.ranks.checks import check_degree, cuts_by_expert
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA

LLAMA = {**TINY_LLAMA, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": 256}


def model(tmp_path: Path, **values: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **values}))
    return ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_heads_are_cut_or_replicated(tmp_path: Path, num_kv_heads: int, degree: int) -> None:
    check_degree(model(tmp_path, num_key_value_heads=num_kv_heads), degree)


@pytest.mark.parametrize(
    ("values", "degree", "message"),
    [
        ({}, 9, "a worker has 1 to 8 ranks, not 9"),
        ({}, 3, "3 ranks cannot share the model's query heads, 8: use 1, 2, 4 or 8"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 3, "3 ranks cannot share 2 KV heads"),
        ({"intermediate_size": 250}, 4, "4 ranks cannot share intermediate_size, 250"),
        ({"intermediate_size": 24}, 4, "each rank would hold 6 of intermediate_size, not a multiple of 4"),
    ],
)
def test_other_degrees_are_refused(tmp_path: Path, values: dict[str, Any], degree: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_degree(model(tmp_path, **values), degree)


def test_blocks_of_fp8_weights_are_not_cut(tmp_path: Path) -> None:
    blocks = replace(model(tmp_path, head_dim=128), quantization=Quantization("block", "group"))
    with pytest.raises(ValueError, match="each rank would hold 64 of intermediate_size, not a multiple of 128"):
        check_degree(blocks, 4)


@pytest.mark.parametrize(
    ("nope_dim", "value_dim", "message"),
    [
        (96, 128, "each rank would hold 320 of rows of queries, not a multiple of 128"),
        (192, 96, "each rank would hold 192 of values of heads, not a multiple of 128"),
    ],
)
def test_blocks_of_latent_attention_are_not_cut(tmp_path: Path, nope_dim: int, value_dim: int, message: str) -> None:
    latent = LatentConfig(q_rank=128, kv_rank=128, nope_dim=nope_dim, rope_dim=64, value_dim=value_dim)
    blocks = replace(model(tmp_path), num_q_heads=4, latent=latent, quantization=Quantization("block", "group"))
    with pytest.raises(ValueError, match=message):
        check_degree(blocks, 2)


def test_experts_are_cut_by_number_if_the_degree_divides_it(tmp_path: Path) -> None:
    experts = {**TINY_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32}
    by_number = model(tmp_path, **experts)
    check_degree(by_number, 4)
    assert cuts_by_expert(by_number, 4)
    sliced = model(
        tmp_path, **{**experts, **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6)}
    )
    check_degree(sliced, 4)
    assert not cuts_by_expert(sliced, 4)
