"""Rotary embeddings in config.json, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.engine.layers.rotary import RotaryEmbedding, rotary_frequencies
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.rope import YarnRopeScaling, read_rope
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA

KEYS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate"),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def read(tmp_path: Path, **changes: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, **changes}))
    return ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_yarn_in_both_forms(tmp_path: Path, family: str) -> None:
    experts = TINY_EXPERTS if "Moe" in family else {}
    base = {"architectures": [family], "rope_theta": 1e6, **experts}
    config = read(tmp_path, **base, rope_scaling=YARN)
    assert config.rope_scaling == YarnRopeScaling(4.0, 16) and config.rope_theta == 1e6
    # YaRN does not lengthen what the key says.
    assert config.max_position_embeddings == 64
    new = {**YARN, "rope_theta": 1e6}
    assert read(tmp_path, **{**base, "rope_theta": None}, rope_parameters=new) == config
    assert read(tmp_path, **base, rope_scaling=YARN, rope_parameters=new) == config
    old = {"type": "yarn", **{key: value for key, value in YARN.items() if key != "rope_type"}}
    assert read(tmp_path, **base, rope_scaling=old) == config


def test_all_keys_of_yarn_are_read(tmp_path: Path) -> None:
    given = {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.5}
    scaling = read(tmp_path, rope_scaling={**YARN, **given, "truncate": False}).rope_scaling
    assert scaling == YarnRopeScaling(4.0, 16, 1.5, 16, 2, 0.7, 0.5, truncate=False)


@pytest.mark.parametrize("key", ["attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"])
def test_null_is_as_good_as_absent(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, rope_scaling={**YARN, key: None}).rope_scaling == YarnRopeScaling(4.0, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN, "original_max_position_embeddings": 8},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 8},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {**YARN, "factor": None}},
        {"rope_scaling": {**YARN, "factor": None}, "original_max_position_embeddings": 8},
    ],
)
def test_lengths_come_from_where_transformers_takes_them(changes: dict[str, Any]) -> None:
    raw = {**TINY_LLAMA, "max_position_embeddings": 64, "rope_theta": 100.0, "head_dim": 32, **changes}
    theta, scaling = read_rope(raw)
    theirs = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    assert isinstance(scaling, YarnRopeScaling) and scaling.table_factor == factor
    assert torch.equal(rotary_frequencies(32, theta, scaling), frequencies)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.5}, "factor must be a number of at least 1, not 0.5"),
        ({"factor": "4"}, "factor must be a number of at least 1, not '4'"),
        ({"factor": 10**400}, "factor must be at most 2147483647, not 1000"),
        (
            {"original_max_position_embeddings": 0},
            "original_max_position_embeddings must be a whole number of at least 1",
        ),
        ({"original_max_position_embeddings": 0, "factor": None}, "original_max_position_embeddings must be a whole"),
        ({"original_max_position_embeddings": 128, "factor": None}, "factor must be a number of at least 1, not 0.5"),
        ({"attention_factor": 0}, "attention_factor must be a number greater than 0, not 0"),
        ({"attention_factor": 2**31}, "attention_factor must be at most 2147483647, not 2147483648"),
        ({"attention_factor": 10**400}, "attention_factor must be a number greater than 0, not 1000"),
        ({"beta_fast": 0}, "beta_fast must be a number of at least 0.001, not 0"),
        ({"beta_fast": 1e9}, "beta_fast must be at most 1000000, not 1000000000.0"),
        ({"beta_slow": -1}, "beta_slow must be a number of at least 0.001, not -1"),
        ({"beta_slow": 33}, "beta_fast 32.0 is less than beta_slow 33"),
        ({"mscale": -0.5}, "mscale must be a number of at least 0, not -0.5"),
        ({"mscale_all_dim": True}, "mscale_all_dim must be a number of at least 0, not True"),
        ({"truncate": 0}, "truncate must be true or false, not 0"),
        ({"truncate": None}, "truncate is missing"),
        ({"rope_theta": 1.0}, "rope_theta must be greater than 1 with rope type 'yarn', not 1.0"),
        ({"rope_theta": "x"}, "rope_theta must be a number greater than 0, not 'x'"),
        ({"finetuned": True}, "rope type 'yarn' with finetuned is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_refuses(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, rope_scaling={**YARN, **changes})


def test_refuses_missing_or_contradictory_values(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="factor is missing"):
        read(tmp_path, rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 16})
    with pytest.raises(ValueError, match="rope_parameters contradicts rope_theta or rope_scaling"):
        read(tmp_path, rope_scaling=YARN, rope_parameters={**YARN, "factor": 8.0})
    with pytest.raises(ValueError, match="max_position_embeddings must be a whole number of at least 1, not 'x'"):
        read(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 2.0}, max_position_embeddings="x")
    with pytest.raises(ValueError, match="max_position_embeddings is missing"):
        read(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 2.0}, max_position_embeddings=None)


WRONG: tuple[Any, ...] = (
    *(True, 0, -1, 5e-324, 1e-9, 0.001, 1.5, 1e6, 1e308, float("nan"), float("inf"), 2**31 - 1, 2**31, 2**70, 10**400),
    *("", "x" * 10_000, [], [1], {}, None),
)


@pytest.mark.parametrize("key", [*KEYS, "rope_theta"])
def test_any_value_gives_finite_tables_or_one_line_with_the_key(tmp_path: Path, key: str) -> None:
    num_refused = 0
    for value in WRONG:
        try:
            config = read(tmp_path, rope_scaling={**YARN, key: value})
        except ValueError as error:
            num_refused += 1
            assert key in str(error) and "\n" not in str(error) and len(str(error)) < 500 + len(str(tmp_path))
        else:
            tables = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling, 64, torch.device("cpu"))
            assert tables.cos.isfinite().all() and tables.sin.isfinite().all()
    assert 8 <= num_refused < len(WRONG)
