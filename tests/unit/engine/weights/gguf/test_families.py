"""Every GGUF architecture against the checkpoint that it was made from, and against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.gguf.convert import convert_gguf
from tandem.engine.weights.gguf.families import FAMILIES
from tandem.engine.weights.loader import checkpoint_weights
from tests.fakes.gguf_files import is_quantized, rounded, write_model
from tests.unit.engine.models.test_decoder import Checkpoint, Runner, make_checkpoint, random_ids

# Metadata that the originals' settings need, by their names in test_decoder.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3_wide_heads": {},
    "qwen2-moe": {},
    "qwen3-moe": {},
    "olmoe": {},
    "olmoe_normalized": {".expert_weights_norm": True},
}
LENGTHS = (4, 33)
NUM_NEW = 16


@pytest.fixture(scope="module", params=MODELS)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Checkpoint]:
    return request.param, make_checkpoint(tmp_path_factory.mktemp("original"), request.param)


def greedy(directory: Path) -> list[list[int]]:
    model = build_model(ModelConfig.from_dir(directory), torch.float32, torch.device("cpu"))
    model.load_weights(checkpoint_weights(directory))
    runner = Runner(model)
    sequences = [runner.sequence(random_ids(n, seed=n), max_len=n + NUM_NEW) for n in LENGTHS]
    logits = runner.prefill(sequences)
    for _ in range(NUM_NEW - 1):
        logits = runner.decode(sequences, logits.argmax(-1).tolist())
    return [[*s.token_ids, token] for s, token in zip(sequences, logits.argmax(-1).tolist(), strict=True)]


def generated(reference: Any) -> list[list[int]]:
    # Other settings would end the text at the tokenizer's EOS.
    reference.generation_config.eos_token_id = None
    prompts = [torch.tensor([random_ids(n, seed=n)]) for n in LENGTHS]
    return [
        reference.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)[0].tolist()
        for prompt in prompts
    ]


def test_float32_restores_the_original(original: tuple[str, Checkpoint], tmp_path: Path) -> None:
    name, checkpoint = original
    out = tmp_path / "out"
    convert_gguf(write_model(tmp_path / "model.gguf", checkpoint.path, MODELS[name]), out)
    assert ModelConfig.from_dir(out) == ModelConfig.from_dir(checkpoint.path)
    expected, found = dict(checkpoint.weights()), dict(checkpoint_weights(out))
    assert found.keys() == expected.keys()
    for key, weight in found.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, expected[key]), key
    assert greedy(out) == generated(checkpoint.reference)


def test_transformers_reads_the_directory(original: tuple[str, Checkpoint], tmp_path: Path) -> None:
    name, checkpoint = original
    convert_gguf(write_model(tmp_path / "model.gguf", checkpoint.path, MODELS[name]), tmp_path / "out")
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    model, loaded = both
    assert type(model) is type(checkpoint.reference)
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    token_ids = torch.tensor([random_ids(40)])
    with torch.inference_mode():
        torch.testing.assert_close(model(token_ids).logits, checkpoint.reference(token_ids).logits)


def test_q8_0_equals_the_dequantized_weights(original: tuple[str, Checkpoint], tmp_path: Path) -> None:
    name, checkpoint = original
    source = write_model(tmp_path / "model.gguf", checkpoint.path, MODELS[name], quantized=True)
    convert_gguf(source, tmp_path / "out")
    weights: dict[str, np.ndarray] = load_file(checkpoint.path / "model.safetensors")
    quantized = {key for key, weight in weights.items() if is_quantized(key, weight)}
    assert len(quantized) > len(weights) // 3
    for key in quantized:
        weights[key] = rounded(weights[key])
    for key, weight in checkpoint_weights(tmp_path / "out"):
        np.testing.assert_array_equal(weight.numpy(), weights[key], key)
    shutil.copytree(checkpoint.path, tmp_path / "dequantized")
    save_file(weights, tmp_path / "dequantized" / "model.safetensors", metadata={"format": "pt"})
    assert greedy(tmp_path / "out") == generated(AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized").eval())


def test_every_architecture_is_converted_above(tmp_path: Path) -> None:
    converted = set()
    for name in MODELS:
        checkpoint = make_checkpoint(tmp_path / name, name)
        converted.add(json.loads((checkpoint.path / "config.json").read_text())["architectures"][0])
    assert converted == {family.architecture for family in FAMILIES.values()}
