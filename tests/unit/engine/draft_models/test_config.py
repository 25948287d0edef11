import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.config import DrafterConfig, check_tokens, engine_page_layout, read_drafter
from tandem.engine.memory_needs import num_weight_bytes
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tests.fakes.model_config import TINY_LLAMA
from tests.fakes.model_shapes import DEEPSEEK_V3

EAGLE: dict[str, Any] = {
    **TINY_LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 8,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
}


def save(directory: Path, config: dict[str, Any], tokens: dict[str, int] | None = None) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if tokens is not None:
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    return directory


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    return save(tmp_path / "target", TINY_LLAMA, {"a": 0, "b": 1})


def drafter(target_dir: Path, source: str, config: dict[str, Any]) -> DrafterConfig:
    directory = save(target_dir.with_name(source), config, {"a": 0, "b": 1})
    found = read_drafter(f"{source}:{directory}", ModelConfig.from_dir(target_dir), target_dir)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("draft", {"vocab_size": 31}, "has a vocab_size of 31, but the model has 32: drafts need the same vocabulary"),
        (
            "draft",
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
            "is a mixture of experts: a draft model must be dense",
        ),
        ("eagle", {"architectures": ["Qwen3ForCausalLM"]}, "architectures must name one of LlamaForCausalLMEagle3"),
        ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers is 2, but EAGLE-3 heads of one layer are supported"),
        ("eagle", {"hidden_size": 32}, "hidden_size is 32, but the model's hidden_size is 16"),
        ("eagle", {"target_hidden_size": 32}, "target_hidden_size is 32, but the model's hidden_size is 16"),
        ("eagle", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "but must read three of the model's 2"),
        ("eagle", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ("eagle", {"draft_vocab_size": 33}, "draft_vocab_size must be at most 32, not 33"),
    ],
)
def test_refusals_name_the_reason(target_dir: Path, source: str, changes: dict[str, Any], message: str) -> None:
    base = EAGLE if source == "eagle" else TINY_LLAMA
    with pytest.raises(ValueError, match=message):
        drafter(target_dir, source, {**base, **changes})


def test_mtp_needs_a_layer_for_further_tokens(target_dir: Path) -> None:
    with pytest.raises(ValueError, match="`speculation` mtp is for models with a layer that predicts further tokens"):
        read_drafter("mtp", ModelConfig.from_dir(target_dir), target_dir)
    assert read_drafter("", ModelConfig.from_dir(target_dir), target_dir) is None


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (2, 5, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, (1, 4, 8)),
        # Named by their outputs.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}, (2, 5, 9)),
    ],
)
def test_layers_that_a_head_reads(tmp_path: Path, keys: dict[str, Any], layers: tuple[int, ...]) -> None:
    target = save(tmp_path / "deep", {**TINY_LLAMA, "num_hidden_layers": 10})
    config = {key: value for key, value in EAGLE.items() if not key.startswith("eagle_")}
    found = drafter(target, "eagle", config | keys).eagle
    assert found is not None and found.layers_read == layers


def test_vocabularies_are_compared_token_by_token(target_dir: Path, tmp_path: Path) -> None:
    same = drafter(target_dir, "draft", TINY_LLAMA)
    check_tokens(same, target_dir)
    tokenizer = same.model_dir / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": [["a", 0.0], ["c", 0.0]]}}))
    with pytest.raises(ValueError, match="has another vocabulary than the model: token 1 is 'c', not 'b'"):
        check_tokens(same, target_dir)
    tokenizer.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: KeyError"):
        check_tokens(same, target_dir)
    tokenizer.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        check_tokens(same, target_dir)


def test_positions_reach_as_far_as_the_target(target_dir: Path) -> None:
    found = drafter(target_dir, "draft", {**TINY_LLAMA, "max_position_embeddings": 8})
    assert found.model.max_position_embeddings == TINY_LLAMA["max_position_embeddings"]


@pytest.mark.parametrize("source", ["draft", "eagle"])
def test_memory_counts_the_drafter(target_dir: Path, source: str) -> None:
    base = EAGLE if source == "eagle" else {**TINY_LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 2}
    found = drafter(target_dir, source, base)
    target = ModelConfig.from_dir(target_dir)
    plain = EngineConfig(str(target_dir), page_size=4)
    drafting = EngineConfig(str(target_dir), page_size=4, drafter=f"{source}:{found.model_dir}")
    # In float32, of numbers in bfloat16.
    assert num_weight_bytes(drafting, target) - num_weight_bytes(plain, target) == 2 * found.weight_bytes
    pages = page_layout_of(target, 4, "float32", "auto").page_bytes
    own = (3 * 2 if source == "draft" else 1) * 2 * 4 * 8 * 4
    states = 0 if source == "draft" else 4 * 16 * 4
    assert pages + own + states <= engine_page_layout(drafting, target).page_bytes < pages + own + states + 3 * 64


def test_published_drafters_take_their_size(tmp_path: Path) -> None:
    mtp = read_drafter("mtp", replace(DEEPSEEK_V3, extra_layers=(61,)), tmp_path)
    assert mtp is not None
    # 14 billion numbers, of which the embedding and the output matrix are the target's.
    assert 11e9 < mtp.weight_bytes / 2 < 12e9
    layout = mtp.page_layout(page_layout_of(DEEPSEEK_V3, 64, "bfloat16", "auto"), 64, "bfloat16")
    whole = page_layout_of(DEEPSEEK_V3, 64, "bfloat16", "auto").page_bytes
    assert whole * (1 + 1 / 61) < layout.page_bytes < 1.1 * whole


def test_weight_bytes_are_those_of_the_parameters(target_dir: Path) -> None:
    found = drafter(target_dir, "draft", TINY_LLAMA)
    model = build_model(found.model, torch.float32, torch.device("cpu"))
    numbers = sum(t.numel() for name, t in model.named_parameters() if t.dim() > 1)
    assert found.weight_bytes == 2 * numbers
