"""Tables and rotations against transformers'."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding, apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    yarn_apply_mscale,
)

from tandem.engine.layers.rotary import RotaryEmbedding, rotary_frequencies, rotate, rotate_pairs
from tandem.engine.models.rope import Llama3RopeScaling, YarnRopeScaling, read_rope, score_factor

CPU = torch.device("cpu")
NUM_POSITIONS = 8192
QWEN3 = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK_V2_LITE = {
    "type": "yarn",
    "rope_theta": 10000,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
DEEPSEEK_V3 = {**DEEPSEEK_V2_LITE, "mscale": 1.0, "mscale_all_dim": 1.0}
# By name: rotated dimensions, max_position_embeddings, and a scaling in config.json.
SCALINGS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "llama 3.1": (
        128,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen 3": (128, 131072, QWEN3),
    "attention factor": (64, 131072, {**QWEN3, "attention_factor": 1.5, "mscale": 0.5, "mscale_all_dim": 1.0}),
    "gpt-oss": (64, 131072, {**QWEN3, "rope_theta": 150000, "factor": 32.0, "truncate": False}),
    "deepseek v2 lite": (64, 163840, DEEPSEEK_V2_LITE),
    "deepseek v3": (64, 163840, DEEPSEEK_V3),
    "different mscales": (64, 163840, {**DEEPSEEK_V2_LITE, "mscale": 1.0}),
    "one mscale": (64, 163840, {**DEEPSEEK_V2_LITE, "mscale_all_dim": 0}),
    "null": (64, 163840, {**DEEPSEEK_V2_LITE, "beta_fast": None, "beta_slow": None, "mscale": None}),
    "no factor": (64, 163840, {**DEEPSEEK_V2_LITE, "factor": None}),
    "factor of 1": (64, 32768, {**QWEN3, "factor": 1.0}),
    "no original length": (64, 32768, {k: v for k, v in QWEN3.items() if k != "original_max_position_embeddings"}),
    "all pairs turn": (32, 65536, {**QWEN3, "rope_theta": 20.0, "factor": 2.0}),
    "no pair turns": (32, 32, {**QWEN3, "original_max_position_embeddings": 4, "factor": 8.0}),
    "a bound beyond the last pair": (32, 131072, {**QWEN3, "rope_theta": 100.0, "beta_fast": 2000, "beta_slow": 0.01}),
    "one bound": (32, 512, {**QWEN3, "beta_fast": 3.0, "beta_slow": 3.0, "factor": 8.0, "truncate": False}),
    "two equal bounds": (16, 512, {**QWEN3, "original_max_position_embeddings": 2, "beta_slow": 0.5, "factor": 2.0}),
}
MODEL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}


def their_config(kind: str, name: str) -> tuple[Any, dict[str, Any]]:
    """Return transformers' configuration, and the content of a config.json with the same rotary embedding."""
    dim, longest, scaling = SCALINGS[name]
    raw = {"max_position_embeddings": longest, "rope_theta": scaling["rope_theta"]}
    raw["rope_scaling"] = {key: value for key, value in scaling.items() if key != "rope_theta"}
    sizes = {"qk_rope_head_dim": dim, "qk_nope_head_dim": 16} if kind.startswith("deepseek") else {"head_dim": dim}
    # Parsed apart, because transformers changes what it is given.
    config = AutoConfig.for_model(kind, **MODEL, **sizes, **json.loads(json.dumps(raw)))
    return config, raw


def positions_of(name: str) -> torch.Tensor:
    longest = min(SCALINGS[name][1], NUM_POSITIONS)
    return torch.tensor([0, 1, longest // 3, longest - 1])


def tables_of(name: str, raw: dict[str, Any]) -> RotaryEmbedding:
    return RotaryEmbedding(SCALINGS[name][0], *read_rope(raw), NUM_POSITIONS, CPU)


def random_heads(name: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return queries and keys, (4, num_heads, rotated dimensions)."""
    torch.manual_seed(0)
    return [torch.randn(4, num_heads, SCALINGS[name][0]).to(dtype) for num_heads in (3, 1)]


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factors_equal_transformers(name: str) -> None:
    config, raw = their_config("llama", name)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, CPU)
    theta, scaling = read_rope(raw)
    ours = rotary_frequencies(SCALINGS[name][0], theta, scaling)
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
    assert (scaling.table_factor if isinstance(scaling, YarnRopeScaling) else 1.0) == their_factor


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotations_equal_those_of_deepseek_v3(name: str, dtype: torch.dtype, is_interleaved: bool) -> None:
    config, raw = their_config("deepseek_v3", name)
    heads = random_heads(name, dtype)
    their_tables = DeepseekV3RotaryEmbedding(config)(heads[0], positions_of(name)[None])
    their_rotate = apply_rotary_pos_emb_interleave if is_interleaved else apply_rotary_pos_emb
    # Theirs are (1, num_heads, num_tokens, rope_dim).
    expected = their_rotate(*(x.transpose(0, 1)[None] for x in heads), *their_tables)
    tables = tables_of(name, raw).at(positions_of(name), dtype)
    for x, theirs in zip(heads, expected, strict=True):
        ours = (rotate_pairs if is_interleaved else rotate)(x, *tables)
        assert ours.shape == x.shape and ours.dtype == dtype
        if is_interleaved:
            # Theirs puts first members of pairs before second ones, in queries and keys alike.
            ours = torch.cat((ours[..., ::2], ours[..., 1::2]), dim=-1)
        assert torch.equal(ours, theirs[0].transpose(0, 1))


@pytest.mark.parametrize("name", SCALINGS)
def test_pairs_rotate_as_the_complex_numbers_of_deepseek_v2(name: str) -> None:
    config, raw = their_config("deepseek_v2", name)
    heads = random_heads(name)
    their_table = DeepseekV2RotaryEmbedding(config)(heads[0], positions_of(name)[None])
    q, k = (x.transpose(0, 1)[None] for x in heads)
    expected = apply_rotary_emb(q, k, their_table)
    tables = tables_of(name, raw).at(positions_of(name), torch.float32)
    for x, theirs in zip(heads, expected, strict=True):
        torch.testing.assert_close(rotate_pairs(x, *tables), theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCALINGS)
def test_factor_of_scores_equals_deepseeks(name: str) -> None:
    config, raw = their_config("deepseek_v3", name)
    if config.rope_parameters["factor"] is None:
        # Theirs fails here.
        config.rope_parameters["factor"] = 40
    assert score_factor(read_rope(raw)[1]) * 192**-0.5 == pytest.approx(
        yarn_apply_mscale(config.rope_parameters, 192**-0.5), rel=1e-15
    )


def test_factor_of_scores_of_published_models() -> None:
    assert score_factor(None) == 1.0
    assert score_factor(Llama3RopeScaling(8.0, 1.0, 4.0, 8192)) == 1.0
    assert score_factor(YarnRopeScaling(4.0, 32768)) == 1.0
    # ln(40) = 3.68888.
    assert score_factor(YarnRopeScaling(40, 4096, mscale=0.707, mscale_all_dim=0.707)) == pytest.approx(1.260804**2)
    assert score_factor(YarnRopeScaling(40, 4096, mscale=1.0, mscale_all_dim=1.0)) == pytest.approx(1.368888**2)


def test_yarn_scales_scores_of_all_positions_alike() -> None:
    scaling = YarnRopeScaling(4.0, 64)
    tables = RotaryEmbedding(16, 1e4, scaling, 256, CPU)
    norms = tables.cos**2 + tables.sin**2
    torch.testing.assert_close(norms, torch.full((256, 8), (0.1 * math.log(4) + 1) ** 2))


def test_pairs_turn_by_their_own_angle() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    angles = torch.tensor([[[math.pi / 2, math.pi]]])
    torch.testing.assert_close(rotate_pairs(x, angles.cos(), angles.sin()), torch.tensor([[[0.0, 1.0, 0.0, -2.0]]]))
